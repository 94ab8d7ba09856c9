"""The daemon's command line, alone and together with file and environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from onebitd import __version__
from onebitd.core.config import SETTINGS
from onebitd.core.errors import ConfigError, UsageError
from onebitd.surfaces.daemon_args import DaemonArgs, load_config, parse

CWD = Path("/here")


def parsed(*argv: str) -> DaemonArgs:
    """Parse as if started in /here."""
    return parse(argv, cwd=CWD)


def usage_fault(*argv: str) -> str:
    """Parse a bad command line and return what is said about it."""
    with pytest.raises(UsageError) as caught:
        parsed(*argv)
    assert caught.value.exit_status == 2
    return str(caught.value)


def test_parse_nothing_serves_with_defaults() -> None:
    """No argument is no fault of the command line."""
    assert parsed() == DaemonArgs("serve", None, None, {}, ())


def test_parse_every_flag_lands_on_its_key() -> None:
    """Paths become absolute, numbers become numbers, each with the flag as written."""
    found = parsed(
        *("--instance", "qwen", "-m", "m.gguf", "--alias", "q", "--device", "cpu"),
        *("--prefill-provider", "bin/p", "--llama-server", "../l", "--host", "::1"),
        *("--port", "0", "--ctx-size=4096", "--print-backend"),
    )
    assert found.action == "print-backend"
    assert found.instance == "qwen"
    assert dict(found.flags) == {
        "model.path": ("-m", "/here/m.gguf"),
        "model.alias": ("--alias", "q"),
        "backend.device": ("--device", "cpu"),
        "provider.program": ("--prefill-provider", "/here/bin/p"),
        "backend.llama_server": ("--llama-server", "/here/../l"),
        "http.host": ("--host", "::1"),
        "http.port": ("--port", 0),
        "model.ctx_size": ("--ctx-size", 4096),
    }


def test_parse_config_path_is_absolute_and_llama_server_name_is_kept() -> None:
    """A bare program name is for PATH, a file name is not."""
    found = parsed("--config", "a.toml", "--llama-server", "llama-server", "--model", "/m")
    assert found.config_path == CWD / "a.toml"
    assert found.flags["backend.llama_server"] == ("--llama-server", "llama-server")
    assert found.flags["model.path"] == ("--model", "/m")


def test_parse_everything_after_the_dashes_is_the_decoders() -> None:
    """Also our own flags, a second --, and --help."""
    found = parsed("-m", "/m", "--", "--port", "1", "--help", "--", "x")
    assert found.backend_args == ("--port", "1", "--help", "--", "x")
    assert "http.port" not in found.flags


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--mmproj", "x"], "--mmproj is refused"),
        (["-md", "x"], "-md is refused"),
        (["-np", "2"], "-np 2 is refused"),
        (["--parallel=2"], "--parallel 2 is refused"),
        (["--mtp"], "--mtp is refused"),
        (["--embedding"], "--embedding is refused"),
        (["--slot-save-path", "/x"], "--slot-save-path is refused"),
        (["--api-key", "k"], "--api-key is refused"),
        (["--threads", "4"], "--threads: unknown flag"),
        (["-np", "1"], "-np: unknown flag"),
        (["-c", "1"], "-c: unknown flag"),
        (["--ctx", "1"], "--ctx: unknown flag"),
        (["-mfile"], "-mfile: unknown flag"),
        (["model.gguf"], "model.gguf: unexpected argument; name the model with -m"),
        (["--port"], "--port: needs a value"),
        (["-m", "--port", "1"], "-m: needs a value"),
        (["--port", "x"], "--port: must be a whole number"),
        (["--port", "1_0"], "--port: must be a whole number"),
        (["-m", ""], "-m: must not be empty"),
        (["--config", ""], "--config: must not be empty"),
        (["--instance", "a", "--config", "b"], "exclude each other"),
        (["--print-backend", "--check-config"], "--check-config"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_parse_bad_command_line_is_one_line_that_names_the_flag(
    argv: list[str], words: str
) -> None:
    """Usage errors are a line of our own, with exit status 2."""
    line = usage_fault(*argv)
    assert words in line
    assert "\n" not in line


def test_parse_several_strangers_are_reported_together() -> None:
    """One run names all of them, a line each; values are no strangers of their own."""
    lines = usage_fault("--mmproj", "x", "--threads", "4", "y").splitlines()
    assert [line.split(":")[0] for line in lines] == ["before --", "--threads", "y"]


def test_parse_negative_number_reaches_the_range_check(tmp_path: Path) -> None:
    """--port -1 is a value out of range, not a flag."""
    args = parsed("-m", "/m", "--port", "-1")
    with pytest.raises(ConfigError, match="--port: must be at least 0"):
        load_config(args, {}, directory=tmp_path)


def test_parse_version_and_help_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """--version is one line; --help names each flag, variable and exit status."""
    with pytest.raises(SystemExit) as caught:
        parsed("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"onebitd {__version__}\n"
    with pytest.raises(SystemExit) as caught:
        parsed("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    flags = "--instance --config -m --alias --device --prefill-provider --llama-server --host"
    for word in f"{flags} --port --ctx-size --print-backend --check-config --version".split():
        assert f"\n  {word}" in text
    for variable in [s.env for s in SETTINGS if s.env] + ["NPU_NO_DEVICE_LOCK"]:
        assert variable in text
    for status in range(5):
        assert f"\n  {status}  " in text
    entry = text.partition("ONEBIT_KV_SHARE")[2].partition("ONEBIT_LLAMA_SERVER")[0]
    assert "not in this version" not in entry


def write(tmp_path: Path, text: str, name: str = "qwen") -> Path:
    """Write a configuration file."""
    path = tmp_path / f"{name}.toml"
    path.write_text(text)
    return path


def problems(args: DaemonArgs, tmp_path: Path, environ: dict[str, str] | None = None) -> list[str]:
    """Load a bad configuration and return its lines."""
    with pytest.raises(ConfigError) as caught:
        load_config(args, environ or {}, directory=tmp_path)
    return list(caught.value.problems)


def test_load_config_instance_reads_its_file_and_flags_beat_it(tmp_path: Path) -> None:
    """File, flag and default in one configuration, each with its source."""
    write(tmp_path, '[model]\npath = "/m/x.gguf"\n[http]\nport = 1\nmax_pending = 2\n')
    config = load_config(parsed("--instance", "qwen", "--port", "3"), {}, directory=tmp_path)
    assert (config.instance, config.model.alias) == ("qwen", "qwen")
    assert (config.http.port, config.http.max_pending) == (3, 2)
    assert config.sources["http.port"] == "flag --port"
    assert config.sources["http.max_pending"] == "file"
    assert config.sources["http.host"] == "default"


def test_load_config_model_alone_is_enough(tmp_path: Path) -> None:
    """No file and no instance: the model's stem names both."""
    config = load_config(parsed("-m", "Qwen 3.gguf"), {}, directory=tmp_path)
    assert config.model.path == "/here/Qwen 3.gguf"
    assert (config.instance, config.model.alias) == ("Qwen-3", "Qwen 3")


def test_load_config_instance_without_file_needs_a_model(tmp_path: Path) -> None:
    """--instance NAME is a name when -m is given, and a missing file when it is not."""
    config = load_config(parsed("--instance", "a", "-m", "/m"), {}, directory=tmp_path)
    assert config.instance == "a"
    lines = problems(parsed("--instance", "a"), tmp_path)
    assert lines == [f"{tmp_path}/a.toml: no such file; write it, or name the model with -m MODEL"]


def test_load_config_named_file_must_exist_and_its_stem_names_the_instance(
    tmp_path: Path,
) -> None:
    """--config FILE is no suggestion."""
    path = write(tmp_path, '[model]\npath = "/m"\n', "phi-4")
    assert load_config(parsed("--config", str(path)), {}).instance == "phi-4"
    lines = problems(parsed("--config", str(tmp_path / "no.toml"), "-m", "/m"), tmp_path)
    assert len(lines) == 1
    assert "no such file" in lines[0]


def test_load_config_instance_name_cannot_choose_a_file_elsewhere(tmp_path: Path) -> None:
    """../x is a bad name, not a path."""
    write(tmp_path, "nonsense = = =")
    (tmp_path / "sub").mkdir()
    with pytest.raises(ConfigError, match=r"instance '\.\./qwen'") as caught:
        load_config(parsed("--instance", "../qwen"), {}, directory=tmp_path / "sub")
    assert "TOML" not in str(caught.value)


def test_load_config_decoder_arguments_are_appended_to_the_files(tmp_path: Path) -> None:
    """backend.args first, then what stands after --."""
    write(tmp_path, '[model]\npath = "/m"\n[backend]\nargs = ["-fa", "on"]\n')
    config = load_config(parsed("--instance", "qwen", "--", "-v"), {}, directory=tmp_path)
    assert config.backend.args == ("-fa", "on", "-v")


def test_load_config_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    """Unknown keys, types, ranges, refusals in file, environment table and after --."""
    path = write(
        tmp_path,
        '[model]\npath = "m"\nctx_size = 10\nx = 1\n[http]\nport = "a"\n'
        '[backend]\nargs = ["--mmproj", "p"]\nenv = {LLAMA_API_KEY = "k"}\n[nope]\n',
    )
    args = parsed("--instance", "qwen", "--device", "", "--", "-np", "4", "-c", "1")
    text = "\n".join(problems(args, tmp_path))
    for part in [
        f"{path}: model.x: unknown key",
        f"{path}: nope: unknown key",
        f"{path}: model.path: must be an absolute path",
        f"{path}: http.port: must be a whole number",
        f"{path}: backend.args: --mmproj is refused",
        f"{path}: backend.env: LLAMA_API_KEY is refused",
        "--device: must not be empty",
        "after --: -np 4 is refused",
        "after --: -c is refused",
    ]:
        assert part in text
    assert len(text.splitlines()) == 9


def test_load_config_bad_argument_list_is_reported_with_arguments_given(tmp_path: Path) -> None:
    """What stands after -- does not hide a fault in the file's list."""
    write(tmp_path, '[model]\npath = "/m"\n[backend]\nargs = [1]\n')
    lines = problems(parsed("--instance", "qwen", "--", "-v"), tmp_path)
    assert len(lines) == 1
    assert "backend.args: item 0 must be a string" in lines[0]


def test_load_config_unreadable_file_hides_nothing_and_invents_nothing(tmp_path: Path) -> None:
    """A syntax error is reported along with the flags' faults, but not as a missing model."""
    write(tmp_path, "[model\n")
    args = parsed("--instance", "qwen", "--port", "99999", "--host", "192.0.2.1", "--", "--pm")
    lines = problems(args, tmp_path)
    assert len(lines) == 3
    assert "not valid TOML" in lines[0]
    assert "--pm is refused" in lines[1]
    assert "--port" in lines[2]


def test_load_config_relative_path_in_the_environment_is_made_absolute(tmp_path: Path) -> None:
    """Whoever exports a relative path means it from where he stands; a name is for PATH."""
    environ = {
        "ONEBIT_HYBRID_PREFILL": "p",
        "ONEBIT_HYBRID_ELFS": "/e",
        "ONEBIT_LLAMA_SERVER": "./l",
    }
    config = load_config(parsed("-m", "/m"), environ, directory=tmp_path, cwd=CWD)
    assert (config.provider.program, config.provider.elfs) == ("/here/p", "/e")
    assert config.backend.llama_server == "/here/l"
    config = load_config(parsed("-m", "/m"), {"ONEBIT_LLAMA_SERVER": "l"}, directory=tmp_path)
    assert config.backend.llama_server == "l"


def test_load_config_flag_beats_environment(tmp_path: Path) -> None:
    """The order is flag, environment, file, default."""
    environ = {"ONEBIT_HYBRID_PREFILL": "/from/env"}
    config = load_config(
        parsed("-m", "/m", "--prefill-provider", "/from/flag"), environ, directory=tmp_path
    )
    assert config.provider.program == "/from/flag"


def test_load_config_credential_is_the_key_file_unless_the_file_names_one(tmp_path: Path) -> None:
    """The last source before the default; it also allows a host that others reach."""
    (tmp_path / "api-key").write_text("k")
    file = tmp_path / "x.toml"
    file.write_text('[model]\npath = "/m"\n[http]\nhost = "0.0.0.0"\n')
    args, environ = parsed("--config", str(file)), {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    config = load_config(args, environ)
    assert config.http.api_key_file == str(tmp_path / "api-key")
    assert config.sources["http.api_key_file"] == "credential api-key"
    file.write_text('[model]\npath = "/m"\n[http]\napi_key_file = "/keys"\n')
    config = load_config(args, environ)
    assert config.http.api_key_file == "/keys"
    assert config.sources["http.api_key_file"] == "file"
    file.write_text('[model]\npath = "/m"\n[http]\nhost = "0.0.0.0"\n')
    with pytest.raises(ConfigError, match=r"required because http\.host"):
        load_config(args, {})
