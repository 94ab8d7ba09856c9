"""Where install-units puts things, what it rewrites, and the manifest."""

from __future__ import annotations

import json
from pathlib import PurePosixPath as Path

import pytest

from onebitd.core import unit_layout
from onebitd.core.unit_layout import Item, Manifest, UnitFilesError

PREFIX = Path("/usr/local")
PROGRAMS = Path("/opt/onebitd/bin")
HOME = "/home" + "/alice"
ROOTS = "/root" + "/venv"


def planned(name: str, content: str) -> str:
    """Return the content that a file of the wheel has once it is installed."""
    items = unit_layout.plan({Path(name): content.encode()}, prefix=PREFIX, programs=PROGRAMS)
    return items[PREFIX / name].data.decode()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("lib/systemd/system/onebitd@.service", True),
        ("lib/systemd/system/onebitd-http@.socket", True),
        ("lib/systemd/user/onebitd@.service", True),
        ("lib/sysusers.d/onebitd.conf", True),
        ("share/man/man8/onebitd.8", True),
        ("share/bash-completion/completions/onebitctl", True),
        ("share/onebitd/onebitd.toml", True),
        ("share/onebitd/drop-ins/lan.conf", True),
        ("share/onebitd/manifest.json", False),
        ("lib/systemd/system/other@.service", False),
        ("lib/tmpfiles.d/other.conf", False),
        ("share/man/man1/isympy.1", False),
        ("lib/python3.11/site-packages/onebitd/client.py", False),
        ("bin/onebitd", False),
    ],
)
def test_is_ours_knows_its_places(name: str, *, ours: bool) -> None:
    """What other packages have put into the environment is not taken along."""
    assert unit_layout.is_ours(Path(name)) is ours


def test_plan_unit_names_the_programs_of_the_environment() -> None:
    """Whole program names are rewritten, and the directory of the drop-ins."""
    before = (
        "# /usr/share/onebitd/drop-ins, /usr/share/onebitd-extra\n"
        "ExecStart=/usr/bin/onebitd --instance %i\nExecReload=/usr/bin/onebitctl reload\n"
        "ExecStartPre=/usr/bin/onebitd-other\nExecStopPost=-/usr/bin/flock -xn /tmp/x\n"
    )
    assert planned("lib/systemd/system/onebitd@.service", before) == (
        "# /usr/local/share/onebitd/drop-ins, /usr/share/onebitd-extra\n"
        "ExecStart=/opt/onebitd/bin/onebitd --instance %i\n"
        "ExecReload=/opt/onebitd/bin/onebitctl reload\n"
        "ExecStartPre=/usr/bin/onebitd-other\nExecStopPost=-/usr/bin/flock -xn /tmp/x\n"
    )


@pytest.mark.parametrize("name", ["share/man/man8/onebitd.8", "lib/sysusers.d/onebitd.conf"])
def test_plan_other_files_arrive_as_they_are(name: str) -> None:
    """A man page speaks of every installation, not of this one."""
    assert planned(name, "/usr/bin/onebitd\n") == "/usr/bin/onebitd\n"


def test_plan_links_every_program() -> None:
    """They are found in PATH, and lead into the environment."""
    items = unit_layout.plan({}, prefix=PREFIX, programs=PROGRAMS)
    assert items == {
        PREFIX / "bin" / name: Item(f"/opt/onebitd/bin/{name}".encode(), is_link=True)
        for name in ("onebitd", "onebitctl", "onebit-prefill-llama", "onebit-prefill-numpy")
    }


def test_directories_of_lists_outer_ones_first() -> None:
    """They can be made in this order."""
    assert unit_layout.directories_of([Path("/a/b/c"), Path("/a/d")]) == [Path("/a"), Path("/a/b")]


@pytest.mark.parametrize(
    ("name", "admin"),
    [
        ("lib/systemd/system/onebitd@.service", "/etc/systemd/system/onebitd@.service"),
        ("lib/tmpfiles.d/onebitd.conf", "/etc/tmpfiles.d/onebitd.conf"),
        ("share/man/man8/onebitd.8", None),
    ],
)
def test_admin_path_is_what_comes_first(name: str, admin: str | None) -> None:
    """Only systemd's places have one."""
    assert unit_layout.admin_path(Path(name)) == (None if admin is None else Path(admin))


@pytest.mark.parametrize(
    ("paths", "hidden"),
    [
        (["/opt/onebitd", "/usr/bin/python3.11"], None),
        (["/opt/onebitd", f"{ROOTS}/bin/python3"], f"{ROOTS}/bin/python3"),
        ([f"{HOME}/venv", "/usr/bin/python3.11"], f"{HOME}/venv"),
        (["/run/user/1000/venv"], "/run/user/1000/venv"),
        (["/homes/venv", "/rooted"], None),
    ],
)
def test_hidden_from_service_finds_home_directories(paths: list[str], hidden: str | None) -> None:
    """A service that cannot see its program fails with a status that explains nothing."""
    found = unit_layout.hidden_from_service(map(Path, paths))
    assert found == (None if hidden is None else Path(hidden))


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("/opt/onebitd-0.1/bin", True),
        ("/opt/my venv/bin", False),
        ("/opt/100%/bin", False),
        ("/opt/../bin", False),
        ("relative", False),
        ('/opt/"/bin', False),
    ],
)
def test_is_plain_path_refuses_what_a_unit_reads_otherwise(path: str, *, plain: bool) -> None:
    """Blanks, percent signs and quotes have a meaning in a unit."""
    assert unit_layout.is_plain_path(Path(path)) is plain


# --- the manifest -------------------------------------------------------------------------------

UNIT = PREFIX / "lib/systemd/system/onebitd@.service"
LINK = PREFIX / "bin/onebitd"


def manifest() -> Manifest:
    """Return one with a file, a link and a directory."""
    entries = {
        UNIT: frozenset({unit_layout.fingerprint(b"a"), unit_layout.fingerprint(b"b")}),
        LINK: frozenset({unit_layout.link_fingerprint("/opt/onebitd/bin/onebitd")}),
    }
    return Manifest(entries, frozenset({UNIT.parent}), "0.1.0")


def test_manifest_dumped_is_read_again() -> None:
    """Nothing is lost, and the text is for people too."""
    text = unit_layout.dump(manifest())
    assert unit_layout.parse(text, prefix=PREFIX) == manifest()
    assert text.decode().splitlines()[1] == ' "format": 1,'


def test_manifest_owns_each_content_that_it_lists_and_no_other() -> None:
    """While an installation is under way, the old content and the new one are ours."""
    assert manifest().owns(UNIT, unit_layout.fingerprint(b"a"))
    assert manifest().owns(UNIT, unit_layout.fingerprint(b"b"))
    assert not manifest().owns(UNIT, unit_layout.fingerprint(b"c"))
    assert not manifest().owns(PREFIX / "bin/other", unit_layout.fingerprint(b"a"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 2),
        ("entries", {"/etc/passwd": ["file:" + "0" * 64]}),
        ("entries", {"/usr/local/bin/bash": ["file:" + "0" * 64]}),
        ("entries", {"/usr/local/share/onebitd/../../../etc/passwd": ["file:" + "0" * 64]}),
        ("entries", {"/usr/local/bin/onebitd": ["file:short"]}),
        ("entries", {"/usr/local/bin/onebitd": [1]}),
        ("entries", ["/usr/local/bin/onebitd"]),
        ("directories", ["relative"]),
        ("directories", ["/usr/../etc"]),
        ("directories", None),
    ],
)
def test_manifest_damaged_is_refused(key: str, value: object) -> None:
    """Root removes what it lists, so nothing in it is believed that could not be."""
    document = json.loads(unit_layout.dump(manifest())) | {key: value}
    with pytest.raises(UnitFilesError):
        unit_layout.parse(json.dumps(document).encode(), prefix=PREFIX)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"format": 1}'])
def test_manifest_of_no_use_is_refused(content: bytes) -> None:
    """A file that was cut off is no empty manifest."""
    with pytest.raises(UnitFilesError, match="damaged"):
        unit_layout.parse(content, prefix=PREFIX)


# --- units --------------------------------------------------------------------------------------


def test_unit_names_are_service_and_both_sockets() -> None:
    """Stopping all of them leaves nothing that starts the service again."""
    names = unit_layout.unit_names("qwen")
    assert names == ["onebitd@qwen.service", "onebitd@qwen.socket", "onebitd-http@qwen.socket"]
    assert {unit_layout.instance_of(name) for name in names} == {"qwen"}


@pytest.mark.parametrize(
    "unit", ["onebitd@.service", "onebitd.service", "other@q.service", "onebitd@q.timer", "x"]
)
def test_instance_of_other_units_is_none(unit: str) -> None:
    """Templates and other units are no instances."""
    assert unit_layout.instance_of(unit) is None
