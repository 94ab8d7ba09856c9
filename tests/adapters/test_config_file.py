"""Configuration, key and other files on a real file system."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebitd.adapters.config_file import (
    MAX_FILE_BYTES,
    ConfigFileMissing,
    check_files,
    credentials,
    is_fatal,
    load,
    path_for,
    read_api_keys,
    readable_by_all,
)
from onebitd.core.config import Config
from onebitd.core.config_resolve import resolve
from onebitd.core.errors import ConfigError

NOBODY = 65534

_KEY, _NAME = b"general.architecture", b"llama"
GGUF = b"GGUF" + struct.pack(
    f"<IQQQ{len(_KEY)}sIQ{len(_NAME)}s", 3, 0, 1, len(_KEY), _KEY, 8, len(_NAME), _NAME
)
"""The smallest file whose header is in order: one key, no tensors."""


def fault(path: Path) -> str:
    """Load a bad file and return its one line."""
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert len(caught.value.problems) == 1
    line = caught.value.problems[0]
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    return line


@contextlib.contextmanager
def without_root() -> Iterator[None]:
    """Run as an ordinary user: root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """Give a directory that every user may enter, which pytest's own is not."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_load_good_file_gives_the_mapping(tmp_path: Path) -> None:
    """A TOML file becomes a mapping."""
    path = tmp_path / "a.toml"
    path.write_text('[model]\npath = "/ä.gguf"\n')
    assert load(path) == {"model": {"path": "/ä.gguf"}}


def test_load_missing_file_says_the_next_step(tmp_path: Path) -> None:
    """No file: a class of its own, and what to do."""
    with pytest.raises(ConfigFileMissing, match=r"no such file; .*--config.*-m"):
        load(tmp_path / "no.toml")


def test_load_unreadable_file_says_permission_denied(open_dir: Path) -> None:
    """A file of root's that others may not read."""
    path = open_dir / "a.toml"
    path.write_text("")
    path.chmod(0)
    with without_root():
        line = fault(path)
    assert "permission denied" in line


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"a = \xff\n", "not UTF-8 in line 1"),
        (b"a = 1\nb = = 2\n", "line 2, column 5"),
        (b"a = 1\na = 2\n", "line 2"),
        (b"a = " + b"9" * 5000 + b"\n", "not valid TOML"),
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b"#" * (MAX_FILE_BYTES + 1), "larger than 1 MiB"),
    ],
    ids=["utf-8", "syntax", "twice", "digits", "nesting", "size"],
)
def test_load_bad_content_is_one_sentence(tmp_path: Path, data: bytes, words: str) -> None:
    """Whatever is in the file, the fault is one line that names it."""
    path = tmp_path / "a.toml"
    path.write_bytes(data)
    assert words in fault(path)


def test_load_what_is_no_file_is_refused_without_blocking(tmp_path: Path) -> None:
    """A directory, and a FIFO that nobody writes to."""
    assert "a directory" in fault(tmp_path)
    os.mkfifo(tmp_path / "f")
    assert "not a regular file" in fault(tmp_path / "f")
    assert "too many levels" in fault(_loop(tmp_path))
    assert "not a directory" in fault(_under_a_file(tmp_path))


def _loop(tmp_path: Path) -> Path:
    link = tmp_path / "loop"
    link.symlink_to(link)
    return link


def _under_a_file(tmp_path: Path) -> Path:
    (tmp_path / "plain").write_text("")
    return tmp_path / "plain" / "a.toml"


def test_path_for_system_and_user(tmp_path: Path) -> None:
    """/etc for everyone; a user's own file first, if it exists; never for root."""
    own = tmp_path / "onebitd" / "a.toml"
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": "/nowhere"}
    assert path_for("a", environ, euid=1) == Path("/etc/onebitd/a.toml")
    own.parent.mkdir()
    own.write_text("")
    assert path_for("a", environ, euid=1) == own
    assert path_for("a", environ, euid=0) == Path("/etc/onebitd/a.toml")
    assert path_for("a", environ, euid=0, directory=tmp_path) == tmp_path / "a.toml"
    assert path_for("b", environ, euid=1, directory=tmp_path) == tmp_path / "b.toml"


def test_path_for_home_stands_in_for_xdg(tmp_path: Path) -> None:
    """~/.config is XDG's default; without either only /etc is left."""
    own = tmp_path / ".config" / "onebitd" / "a.toml"
    own.parent.mkdir(parents=True)
    own.write_text("")
    assert path_for("a", {"HOME": str(tmp_path)}, euid=1) == own
    assert path_for("a", {}, euid=1) == Path("/etc/onebitd/a.toml")


def test_path_for_relative_xdg_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative base would make the file depend on the working directory."""
    (tmp_path / "onebitd").mkdir()
    (tmp_path / "onebitd" / "a.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert path_for("a", {"XDG_CONFIG_HOME": "."}, euid=1) == Path("/etc/onebitd/a.toml")


def test_read_api_keys_skips_blanks_and_comments(tmp_path: Path) -> None:
    """One key a line, stripped; a # inside a key is part of it."""
    path = tmp_path / "keys"
    path.write_text("# ours\n\n  one \r\ntwo#2\n")
    assert read_api_keys(path) == ("one", "two#2")


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"one", ("one",)),
        (b"one\r\ntwo\r\n", ("one", "two")),
        (b"\xef\xbb\xbfone\n", ("one",)),
        (b"\xef\xbb\xbf# mine\x07\none\n", ("one",)),
        (b"two words\n\ttabbed\t\n", ("two words", "tabbed")),
        ("schl\u00fcssel\n\u9375\u2028x\n".encode(), ("schl\u00fcssel", "\u9375\u2028x")),
    ],
)
def test_read_api_keys_as_editors_write_them(
    tmp_path: Path, data: bytes, keys: tuple[str, ...]
) -> None:
    """Line ends of Windows, its mark at the start, other scripts; a line is one key."""
    path = tmp_path / "keys"
    path.write_bytes(data)
    assert read_api_keys(path) == keys


@pytest.mark.parametrize(
    ("mode", "parent", "words"),
    [
        (0o600, 0o755, ""),
        (0o640, 0o755, ""),
        (0o644, 0o750, ""),
        (0o644, 0o755, "may read it (mode 0644)"),
        (0o602, 0o755, "may write it (mode 0602)"),
        (0o777, 0o711, "may read it (mode 0777)"),
    ],
)
def test_readable_by_all_names_the_mode_and_chmod(mode: int, parent: int, words: str) -> None:
    """The group may read it, and a directory that nobody else enters is as good."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path = Path(directory) / "keys"
        path.write_text("one\n")
        path.chmod(mode)
        path.parent.chmod(parent)
        line = readable_by_all(path)
        assert (words in line) if words else (line == "")
        assert not words or line.endswith(f"chmod o-rwx {path}")
        assert "one" not in line.replace(str(path), "")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"# none\n\n", "no API key"),
        (b"\xef\xbb\xbf", "no API key"),
        (b"s3cret\xff\n", "not UTF-8"),
        (b"ok\ns3cret\x00\n", "line 2 holds a control character"),
        (b"s3cret\rs3cret\n", "line 1 holds a control character"),
    ],
)
def test_read_api_keys_bad_file_is_an_error_without_keys(
    tmp_path: Path, data: bytes, words: str
) -> None:
    """An empty key file must not mean "no keys needed"; no key gets into the message."""
    path = tmp_path / "keys"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=words) as caught:
        read_api_keys(path)
    assert "s3cret" not in str(caught.value)


def test_read_api_keys_missing_file_names_the_setting(tmp_path: Path) -> None:
    """The line says which key of the configuration to correct."""
    with pytest.raises(ConfigError, match=r"no such file.*http\.api_key_file"):
        read_api_keys(tmp_path / "keys")


def config(tmp_path: Path, **sections: dict[str, object]) -> Config:
    """Resolve a configuration whose every file is in order, with changes."""
    model, server = tmp_path / "m.gguf", tmp_path / "llama-server"
    model.write_bytes(GGUF)
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    file: dict[str, dict[str, object]] = {
        "model": {"path": str(model)},
        "backend": {"llama_server": str(server)},
        "lock": {"path": str(tmp_path / "lock")},
    }
    for name, section in sections.items():
        file[name] = file.get(name, {}) | section
    return resolve(instance="a", file=file, file_name="a.toml")


def test_check_files_good_configuration_has_no_fault(tmp_path: Path) -> None:
    """Everything is there: nothing to say."""
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    good = config(
        tmp_path,
        provider={"program": str(tmp_path / "llama-server"), "elfs": str(tmp_path)},
        http={"api_key_file": str(keys)},
        handoff={"state_dir": str(tmp_path / "new")},
    )
    assert check_files(good) == []


def test_check_files_reports_every_fault_at_once(tmp_path: Path) -> None:
    """Each file that is not there has its own line with its key path."""
    bad = config(
        tmp_path,
        model={"path": "/no/m.gguf"},
        backend={"llama_server": "/no/l"},
        provider={"program": "/no/p", "elfs": "/no/e"},
        http={"api_key_file": "/no/k"},
        handoff={"state_dir": "/no/state/dir"},
        lock={"path": "/no/lock"},
    )
    lines = check_files(bad)
    assert [line.partition(": ")[0] for line in lines] == [
        *("model.path", "backend.llama_server", "provider.program", "provider.elfs"),
        *("http.api_key_file", "handoff.state_dir", "lock.path"),
    ]
    assert all("no such file" in line and "; " in line for line in lines)


def test_check_files_model_that_is_no_gguf(tmp_path: Path) -> None:
    """The first four bytes tell, as do a directory and an empty file."""
    other = tmp_path / "other"
    other.write_bytes(b"PK\3\4")
    for path, words in ((other, "not a GGUF file"), (tmp_path, "a directory")):
        lines = check_files(config(tmp_path, model={"path": str(path)}))
        assert len(lines) == 1
        assert words in lines[0]


@pytest.mark.parametrize("size", [4, 20, len(GGUF) - 1])
def test_check_files_model_that_is_cut_says_so(tmp_path: Path, size: int) -> None:
    """A download that broke off is found by --check-config, with what to do."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(GGUF[:size])
    (line,) = check_files(config(tmp_path, model={"path": str(cut)}))
    assert line.startswith(f"model.path: {cut}: ")
    assert line.endswith("the file is cut off or damaged, fetch it again")


def test_check_files_provider_that_is_not_there_says_that_path_is_not_searched(
    tmp_path: Path,
) -> None:
    """A bare name becomes a file of the working directory; whoever meant PATH learns it."""
    (line,) = check_files(config(tmp_path, provider={"program": str(tmp_path / "no")}))
    assert line.startswith(f"provider.program: {tmp_path}/no: no such file")
    assert "PATH is not searched" in line


def test_check_files_unreadable_model(open_dir: Path) -> None:
    """A model that the daemon's user may not read is found before llama-server fails on it."""
    given = config(open_dir)
    Path(given.model.path).chmod(0)
    Path(given.lock.path).touch(0o644)
    with without_root():
        lines = check_files(given)
    assert ["permission denied" in line for line in lines] == [True]


def test_check_files_programs_that_cannot_run(tmp_path: Path) -> None:
    """Not executable, and a directory."""
    plain = tmp_path / "plain"
    plain.write_text("")
    given = config(
        tmp_path, backend={"llama_server": str(plain)}, provider={"program": str(tmp_path)}
    )
    server, provider = check_files(given)
    assert "not executable" in server
    assert "is a directory" in provider


def test_check_files_program_name_is_looked_up_in_path(tmp_path: Path) -> None:
    """PATH of backend.env beats the process's, as it does when the program is started."""
    name: dict[str, object] = {"llama_server": "llama-server"}
    here, nowhere = {"PATH": str(tmp_path)}, {"PATH": "/nowhere"}
    assert check_files(config(tmp_path, backend=name), here) == []
    assert (
        "no program llama-server in PATH" in check_files(config(tmp_path, backend=name), nowhere)[0]
    )
    assert check_files(config(tmp_path, backend=name | {"env": here}), nowhere) == []


def test_check_files_lock_that_cannot_be_taken_is_found(open_dir: Path) -> None:
    """Before the first handoff falls back: the wrong kind of file, and one of somebody else."""
    given = config(open_dir)
    lock = Path(given.lock.path)
    lock.symlink_to(open_dir / "elsewhere")
    (line,) = check_files(given)
    assert line.startswith(f"lock.path: {lock}: it is a symbolic link")
    lock.unlink()
    lock.touch(0o600)
    assert check_files(given) == []
    if os.geteuid() != 0:
        return
    with without_root():
        lines = check_files(given)
    assert [f"lock.path: {lock}: it may not be opened by the user" in line for line in lines] == [
        True
    ]


def test_check_files_lock_is_not_looked_at_when_none_is_taken(tmp_path: Path) -> None:
    """NPU_NO_DEVICE_LOCK: the lock's directory does not matter."""
    good = config(tmp_path)
    given = resolve(
        instance="a",
        file={
            "model": {"path": good.model.path},
            "backend": {"llama_server": good.backend.llama_server},
            "lock": {"path": "/no/lock"},
        },
        environ={"NPU_NO_DEVICE_LOCK": "1"},
    )
    assert check_files(given) == []


def test_credentials_are_those_that_are_there(tmp_path: Path) -> None:
    """No directory, no file, a relative directory: none; the path is absolute."""
    assert credentials({}) == {}
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert credentials(environ) == {}
    assert credentials({"CREDENTIALS_DIRECTORY": str(tmp_path / "no")}) == {}
    (tmp_path / "api-key").write_text("k")
    (tmp_path / "another").write_text("k")
    assert credentials(environ) == {"api-key": str(tmp_path / "api-key")}
    assert credentials({"CREDENTIALS_DIRECTORY": os.path.relpath(tmp_path)}) == {}


def test_credentials_that_cannot_be_looked_at_count(tmp_path: Path) -> None:
    """Whoever then reads the keys fails; serving without keys would be the worse mistake."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o600)
        with without_root():
            assert credentials({"CREDENTIALS_DIRECTORY": name}) == {"api-key": f"{name}/api-key"}
            with pytest.raises(ConfigError, match="permission denied"):
                read_api_keys(Path(name) / "api-key")


def test_is_fatal_is_all_but_what_only_handoffs_need() -> None:
    """A missing provider or lock costs handoffs, anything else the start."""
    assert not is_fatal("provider.program: /p: no such file")
    assert not is_fatal("lock.path: /l: no such directory")
    assert is_fatal("http.api_key_file: /k: holds no API key")
    assert is_fatal("model.path: /m: no such file")
