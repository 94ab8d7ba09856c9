"""The man pages say what the code does: flags, words, fields, variables, numbers, examples."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from onebitd import prefill_llama
from onebitd.adapters import provider_process, systemd
from onebitd.core import errors
from onebitd.core.breaker import LIMITS, FailureClass, Limit
from onebitd.core.config import NO_LOCK_VARIABLE, SETTINGS, Policy
from onebitd.core.handoff import FIELDS, Outcome, Reason
from onebitd.prefill_numpy import engine as numpy_engine
from onebitd.prefill_numpy import program as numpy_program
from onebitd.services import supervisor
from onebitd.services.history import History
from onebitd.surfaces import daemon_args
from tests.llama_builds import ROOT, require_program

PAGES = sorted((ROOT / "man").iterdir())
DAEMON = ROOT / "man" / "onebitd.8"
PROVIDER = ROOT / "man" / "onebit-provider.7"
CLIENT = ROOT / "man" / "onebitctl.1"
PACKAGE = ROOT / "onebitd"


def source(page: Path) -> str:
    """Return a page as it is written, comments left out."""
    lines = page.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith('.\\"'))


def section(page: Path, title: str) -> str:
    """Return the source of one section (.Sh)."""
    found = re.search(rf"^\.Sh {title}\n(.*?)(?=^\.Sh |\Z)", source(page), re.M | re.S)
    assert found, f"{page.name} has no section {title}"
    return found.group(1)


def rendered(page: Path) -> str:
    """Return the page as its reader sees it, blanks joined."""
    require_program("mandoc")
    done = subprocess.run(
        ["mandoc", "-T", "ascii", str(page)], capture_output=True, text=True, check=True
    )
    return re.sub(r"\s+", " ", re.sub(r".\x08", "", done.stdout))


def items(text: str, macro: str) -> list[str]:
    """Return the words that a macro has in the heads of a list: `.It Fl m Ar X , Fl -model`."""
    found: list[str] = []
    for head in re.findall(rf"^\.It ({macro} .*)$", text, re.MULTILINE):
        current = ""
        for word in head.split():
            if word[0].isupper() and len(word) == 2:
                current = word
            elif word != "," and current == macro:
                found.append(word)
    return found


def flags(text: str) -> set[str]:
    """Return the flags that stand in the heads of a list, as they are typed."""
    return {"-" + word for word in items(text, "Fl")}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_man_page_passes_lint(page: Path) -> None:
    """mandoc has nothing to say about it."""
    require_program("mandoc")
    done = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", str(page)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_man_page_refers_to_pages_that_exist(page: Path) -> None:
    """A cross reference to one of our pages leads somewhere."""
    for name, number in re.findall(r"^\.Xr (onebit[\w.-]*) (\d)", source(page), re.MULTILINE):
        assert (ROOT / "man" / f"{name}.{number}").is_file(), name


# --- flags --------------------------------------------------------------------------------------


def daemon_flags() -> set[str]:
    """Return every flag of onebitd; `--` is not argparse's."""
    actions = daemon_args._parser()._actions
    return {option for action in actions for option in action.option_strings} | {"--"}


def provider_flags(capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return every flag of the reference provider, from its --help."""
    with pytest.raises(SystemExit):
        prefill_llama.parse_options(["--help"], {})
    heads = re.findall(r"^  (-.*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    return {word for head in heads for word in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", head)}


def test_onebitd_page_options_are_those_of_the_parser() -> None:
    """Every flag is described, and none that does not exist."""
    assert flags(section(DAEMON, "DESCRIPTION")) == daemon_flags()


def test_onebitd_page_synopsis_has_the_long_flags() -> None:
    """The synopsis leaves out nothing but help and the second spelling of -m."""
    words = re.findall(r"\s(-+[\w-]*)", section(DAEMON, "SYNOPSIS").replace("Fl ", "Fl -"))
    shown = {word if word.startswith("--") or len(word) < 3 else "-" + word for word in words}
    assert shown == daemon_flags() - {"-h", "--help", "--model"}


def test_provider_page_options_are_those_of_the_parser(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every flag of the reference provider is described, and none that does not exist."""
    assert flags(section(PROVIDER, "REFERENCE PROVIDER")) == provider_flags(capsys)


def test_provider_page_worked_example_has_its_options_and_parts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every flag of onebit-prefill-numpy, and its files in the order of a run."""
    with pytest.raises(SystemExit):
        numpy_program.parse_options(["--help"], {})
    heads = re.findall(r"^  (-.*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    ours = {word for head in heads for word in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", head)}
    text = section(PROVIDER, "WORKED EXAMPLE")
    assert flags(text) == ours
    for name in re.findall(r"^\.Pq? ?Pa ([\w]+\.py)|^\.Pa ([\w]+\.py)", text, re.MULTILINE):
        assert (PACKAGE / "prefill_numpy" / "".join(name)).is_file(), name
    assert f"{numpy_engine.CHUNK} tokens at a time" in text
    assert numpy_program.PROGRAM in text


def test_provider_help_has_words_for_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag without a sentence leaves the reader alone, as --device did."""
    with pytest.raises(SystemExit):
        prefill_llama.parse_options(["--help"], {})
    options = capsys.readouterr().out.partition("options:\n")[2].partition("\nenvironment")[0]
    entries = re.split(r"\n(?=  -)", options.strip("\n"))
    assert len(entries) >= 10
    for entry in entries:
        words = re.sub(r"^  -\S+( [A-Z_]+)?(, -\S+( [A-Z_]+)?)?", "", entry).split()
        assert len(words) >= 3, entry


def test_provider_page_contract_options_are_those_of_the_reference_provider(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The contract asks for nothing that the reference provider does not take."""
    contract = flags(section(PROVIDER, "ONE RUN"))
    assert contract == {"--tokens", "--out", "--model", "--elfs"}
    assert contract <= provider_flags(capsys)


# --- words --------------------------------------------------------------------------------------


def test_onebitd_page_outcomes_are_those_of_the_code() -> None:
    """Each outcome is explained, in the order of the code."""
    assert items(section(DAEMON, "OUTCOMES"), "Cm") == list(Outcome)


def test_onebitd_page_reasons_are_those_of_the_code() -> None:
    """Each reason is explained, in the order of the code."""
    assert items(section(DAEMON, "REASONS"), "Cm") == list(Reason)


WHAT_TO_DO = (
    *("Correct", "Do", "Find", "Give", "Make", "Nothing to do", "Please report", "Raise"),
    *("Report", "Run", "See", "Set", "Take", "Wait", "add"),
)


@pytest.mark.parametrize("reason", Reason)
def test_onebitd_page_reason_says_what_to_do(reason: Reason) -> None:
    """After what it means, a sentence that tells somebody to do something, or nothing."""
    entry = section(DAEMON, "REASONS").partition(f"\n.It Cm {reason}\n")[2].partition("\n.It ")[0]
    assert re.search(rf"^(?:{'|'.join(WHAT_TO_DO)})\b", entry, re.MULTILINE), entry


@pytest.mark.parametrize("reason", Reason)
def test_onebitd_page_reason_is_not_in_this_version_only_if_nothing_gives_it(
    reason: Reason,
) -> None:
    """A reason that the code gives is not called absent, nor the other way round."""
    entry = section(DAEMON, "REASONS").partition(f"\n.It Cm {reason}\n")[2].partition("\n.It ")[0]
    given = any(
        re.search(rf"\bReason\.{reason.name}\b", path.read_text())
        for path in PACKAGE.rglob("*.py")
        if path.name != "handoff.py" or path.parent.name != "core"
    )
    assert entry.startswith("Not in this version") is not given


def test_onebitd_page_breaker_classes_and_numbers_are_those_of_the_code() -> None:
    """Each class has its row in the table, with what the code counts and waits, and its words."""
    text = section(DAEMON, "BREAKER")
    units = {"s": 1.0, "min": 60.0, "h": 3600.0}
    found = {}
    for name, count, *pauses in re.findall(
        r"^\.It Cm (\w+) Ta (\d+) Ta (\d+) (\w+) Ta (\d+) (\w+)$", text, re.MULTILINE
    ):
        first_s, last_s = (int(pauses[at]) * units[pauses[at + 1]] for at in (0, 2))
        found[name] = Limit(int(count), first_s, last_s)
    assert found == LIMITS
    assert set(re.findall(r"^\.It Cm (\w+)$", text, re.MULTILINE)) == set(FailureClass)


def test_onebitd_page_policies_are_those_of_the_code() -> None:
    """Each policy is explained; the last is the header's alone."""
    assert items(section(DAEMON, "HANDOFF POLICY"), "Cm") == list(Policy)


def test_onebitd_page_fields_are_those_of_the_record() -> None:
    """Each field of the log line is explained, and none that does not exist."""
    found = items(section(DAEMON, "LOG"), "Va")
    assert sorted(found) == sorted(FIELDS)


def test_onebitd_page_control_endpoints_are_those_of_the_code() -> None:
    """Each endpoint of the control socket is listed, and none that does not exist."""
    text = (PACKAGE / "surfaces" / "control_http.py").read_text()
    ours = re.findall(r'^    @app\.(get|post)\((?:"(.+)"|METRICS_PATH)\)$', text, re.MULTILINE)
    page = section(DAEMON, "CONTROL SOCKET")
    heads = "\n".join(re.findall(r"^\.It Li (.*)$", page, re.MULTILINE))
    assert sorted(re.findall(r"(GET|POST) (/\S+)", heads)) == sorted(
        (verb.upper(), path or "/metrics") for verb, path in ours
    )


def test_onebitd_page_exit_statuses_are_those_of_the_errors() -> None:
    """Every status that an error has is explained."""
    classes = [thing for thing in vars(errors).values() if isinstance(thing, type)]
    ours = {kind.exit_status for kind in classes if issubclass(kind, errors.OnebitError)}
    listed = re.findall(r"^\.It (\d+)$", section(DAEMON, "EXIT STATUS"), re.MULTILINE)
    assert {int(number) for number in listed} == ours | {0}


def test_provider_page_exit_statuses_are_those_of_the_program() -> None:
    """Every status of the reference provider is explained."""
    ours = {value for name, value in vars(prefill_llama).items() if name.startswith("EXIT_")}
    listed = re.findall(r"^\.It (\d+)$", section(PROVIDER, "EXIT STATUS"), re.MULTILINE)
    assert {int(number) for number in listed} == ours | {0}


# --- the environment ----------------------------------------------------------------------------


def variables_read(path: Path) -> set[str]:
    """Return the names that a module looks up in `environ`, `env` or `os.environ`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        target: ast.expr | None = None
        key: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("get", "pop"):
                target, key = node.func.value, node.args[0]
        elif isinstance(node, ast.Subscript):
            target, key = node.value, node.slice
        if target is None or not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            continue
        if re.fullmatch(r"(.*\.)?(_?environ|env)", ast.unparse(target)):
            found.add(key.value)
    return {name for name in found if re.fullmatch(r"[A-Z][A-Z0-9_]+", name)}


def page_of(module: Path) -> Path:
    """Return the page of the program that a module belongs to."""
    if module.name == "prefill_llama.py" or module.parent.name == "prefill_numpy":
        return PROVIDER
    of_client = module.stem == "client" or module.stem.partition("_")[0] == "cli"
    of_client |= module.parent.name in ("conformance", "doctor", "state_tools")
    return CLIENT if of_client else DAEMON


def test_man_pages_name_every_variable_that_the_code_reads() -> None:
    """Each is in the ENVIRONMENT of its program's page."""
    read = {
        (page_of(path), name) for path in PACKAGE.rglob("*.py") for name in variables_read(path)
    }
    read |= {(DAEMON, setting.env) for setting in SETTINGS if setting.env}
    read |= {(DAEMON, name) for name in (NO_LOCK_VARIABLE, *systemd._VARIABLES)}
    assert len(read) > 15
    missing = [
        f"{page.name}: {name}"
        for page, name in sorted(read)
        if name not in items(section(page, "ENVIRONMENT"), "Ev")
    ]
    assert missing == []


@pytest.mark.parametrize("page", [DAEMON, PROVIDER], ids=lambda path: path.name)
def test_man_page_names_no_variable_that_the_code_does_not_know(page: Path) -> None:
    """Each variable of ENVIRONMENT stands in the code; PATH is looked up by the library."""
    text = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for name in items(section(page, "ENVIRONMENT"), "Ev"):
        assert name == "PATH" or f'"{name}"' in text, name


# --- numbers and examples -----------------------------------------------------------------------


def test_onebitd_page_numbers_are_those_of_the_code() -> None:
    """Limits in the page are the constants."""
    text = rendered(DAEMON)
    assert f"The last {History()._records.maxlen} records" in text
    assert f"to end within {supervisor.PATIENCE_S:g} seconds" in text


def test_provider_page_numbers_are_those_of_the_code() -> None:
    """Limits in the page are the constants."""
    text = rendered(PROVIDER)
    assert provider_process._TERM_GRACE_S == 2.0
    assert "SIGKILL two seconds later" in text
    assert f"is {provider_process._CANCEL_GRACE_S:g} seconds" in text
    assert f"{prefill_llama.DEFAULT_TIMEOUT_S:g} by default" in text


def test_onebitd_page_examples_parse() -> None:
    """An example that the program refuses is worse than none."""
    examples = re.findall(r"^\.Dl [#$] onebitd (.*)$", source(DAEMON), re.MULTILINE)
    assert len(examples) >= 3
    for example in examples:
        daemon_args.parse(shlex.split(example))


def example_provider() -> str:
    """Return the shell script of the provider page."""
    found = re.search(r"^\.Bd -literal[^\n]*\n(#!/bin/sh\n.*?)^\.Ed", source(PROVIDER), re.M | re.S)
    assert found
    return found.group(1).replace("\\e", "\\")


def test_provider_page_example_names_programs_by_their_paths() -> None:
    """The daemon's PATH is not the reader's; README installs below /opt/onebitd."""
    assert re.findall(r"(\S*)onebit-prefill-llama", example_provider()) == ["/opt/onebitd/bin/"]
    assert "-m venv /opt/onebitd\n" in (ROOT / "README.md").read_text()


ENGINE = """\
#!/bin/sh
echo "$@" >"$LOG"
if [ "${FAIL:-}" ]; then echo "engine: no device" >&2; exit 3; fi
echo state >"$4"
echo '{"prefill_ms": 1.5}'
"""


def run_example(home: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the page's provider with a program of ours in the place of the reference provider."""
    script = example_provider().replace("/opt/onebitd/bin/", f"{home}/")
    for name, text in (("prefill-cpu", script), ("onebit-prefill-llama", ENGINE)):
        (home / name).write_text(text)
        (home / name).chmod(0o700)
    environ = {"PATH": f"{home}:{os.environ['PATH']}", "LOG": str(home / "log"), **env}
    command = [str(home / "prefill-cpu"), "--tokens", "ids", "--out", str(home / "state"), *args]
    return subprocess.run(
        command, env=environ, cwd=home, capture_output=True, text=True, check=False
    )


def test_provider_page_example_keeps_the_contract(tmp_path: Path) -> None:
    """The script writes to another name, renames, and lets the result line through."""
    done = run_example(tmp_path, "--model", "m.gguf", "--elfs", "dir")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == '{"prefill_ms": 1.5}\n'
    assert (tmp_path / "state").read_text() == "state\n"
    assert not (tmp_path / "state.part").exists()
    assert f"--out {tmp_path}/state.part --model m.gguf" in (tmp_path / "log").read_text()


def test_provider_page_example_passes_a_failure_on(tmp_path: Path) -> None:
    """Status and last words are the engine's, and there is no state file."""
    done = run_example(tmp_path, "--model", "m.gguf", FAIL="1")
    assert (done.returncode, done.stderr) == (3, "engine: no device\n")
    assert not (tmp_path / "state").exists()


def test_provider_page_example_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    """Another argument is an error, not silence."""
    done = run_example(tmp_path, "--model", "m.gguf", "--fds", "3")
    assert done.returncode == 2
    assert "unknown argument --fds" in done.stderr
