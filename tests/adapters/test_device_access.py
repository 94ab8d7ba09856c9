"""onebitd.adapters.device_access: a fake tree in the place of /dev."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebitd.adapters import device_access
from onebitd.adapters.device_access import refusal
from tests.llama_builds import short_temporary_directory

DENIED = "status 1: Permission denied"
RENDER, VIDEO = 65001, 65002
"""Groups without a name here."""
PINNED = "status 1: mmap(len=67108864) failed (err=-11): Resource temporarily unavailable"


@pytest.fixture
def dev() -> Iterator[Path]:
    """A tree that anybody may look into, with nodes that are files, and others beside them."""
    with short_temporary_directory() as path:
        path.chmod(0o755)
        for name in ("accel/accel0", "dri/renderD128", "dri/card0", "kfd", "null"):
            node = path / name
            node.parent.mkdir(mode=0o755, exist_ok=True)
            node.touch()
            node.chmod(0o660)
        yield path


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")


def test_refusal_all_devices_open_and_no_limit_is_nothing(dev: Path) -> None:
    """What was denied is something else: nothing is invented."""
    assert refusal(DENIED, dev=dev, can_open=lambda _: True, memlock_bytes=-1) is None


def test_refusal_no_device_at_all_is_nothing(tmp_path: Path) -> None:
    """A box without an NPU has other troubles."""
    closed = refusal(DENIED, dev=tmp_path, can_open=lambda _: False, memlock_bytes=-1)
    assert closed is None


@needs_root
def test_refusal_closed_device_names_node_owner_mode_and_the_group_to_join(dev: Path) -> None:
    """One sentence; its last part is what to do."""
    os.chown(dev / "accel/accel0", 0, RENDER)
    node = dev / "accel/accel0"
    said = refusal(DENIED, dev=dev, can_open=lambda it: it != node, groups=[VIDEO])
    assert said == (
        f"this process (user root) may not open {node} (root:{RENDER}, mode 0660): add its user to"
        f" the group {RENDER}, or SupplementaryGroups={RENDER} to its service, and restart it"
    )


@needs_root
def test_refusal_several_closed_devices_name_each_group_once(dev: Path) -> None:
    """NPU and GPU nodes most often have the same one; /dev/dri/card0 is nobody's business."""
    for name in ("accel/accel0", "dri/renderD128", "dri/card0"):
        os.chown(dev / name, 0, RENDER)
    os.chown(dev / "kfd", 0, VIDEO)
    said = str(refusal(DENIED, dev=dev, can_open=lambda _: False, groups=[]))
    assert [name in said for name in ("accel0", "renderD128", "kfd", "card0")] == [True] * 3 + [
        False
    ]
    assert f"SupplementaryGroups={RENDER} {VIDEO} to" in said
    assert f"to the groups {RENDER} {VIDEO}," in said


def test_refusal_device_that_the_provider_named_is_the_only_one_told(dev: Path) -> None:
    """Other closed devices need not be its trouble."""
    detail = f"status 1: open({dev}/kfd): Permission denied"
    said = str(refusal(detail, dev=dev, can_open=lambda _: False, groups=[]))
    assert f"may not open {dev}/kfd (" in said
    assert "accel0" not in said


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_refusal_node_that_no_group_may_open_asks_for_a_udev_rule(dev: Path, mode: int) -> None:
    """There is no group to name then, and none is made up."""
    (dev / "kfd").chmod(mode)
    said = str(refusal(DENIED, dev=dev, can_open=lambda node: node.name != "kfd", groups=[]))
    assert "no group would help" in said
    assert "SupplementaryGroups" not in said


@needs_root
def test_refusal_group_that_it_has_already_is_not_named(dev: Path) -> None:
    """An access list may deny what the mode allows."""
    os.chown(dev / "kfd", 0, RENDER)
    said = refusal(DENIED, dev=dev, can_open=lambda node: node.name != "kfd", groups=[RENDER])
    assert "no group would help" in str(said)


@pytest.mark.parametrize(
    ("detail", "limit", "said"),
    [
        (PINNED, 8 << 20, "may lock 8 MiB of memory (RLIMIT_MEMLOCK): set LimitMEMLOCK=infinity"),
        (PINNED, 64 << 10, "may lock 64 KiB of memory"),
        (PINNED, 1 << 30, "may lock 1024 MiB of memory"),
        (PINNED, -1, None),
        (DENIED, 8 << 20, "may lock 8 MiB of memory"),
        (DENIED, 1 << 30, None),
        (DENIED, -1, None),
    ],
)
def test_refusal_memory_limit_is_told_where_it_may_be_the_cause(
    dev: Path, detail: str, limit: int, said: str | None
) -> None:
    """Always when the words are about locked memory; else when it is small and no device closed."""
    found = refusal(detail, dev=dev, can_open=lambda _: True, memlock_bytes=limit)
    assert found is None if said is None else said in str(found)


def test_refusal_words_about_locked_memory_leave_the_devices_out(dev: Path) -> None:
    """It has opened its device by then."""
    found = refusal(PINNED, dev=dev, can_open=lambda _: False, memlock_bytes=8 << 20)
    assert "may not open" not in str(found)


@pytest.mark.parametrize(
    "detail",
    [
        "program /opt/prefill is not an executable file; check its mode",
        "status 126: setpriv: failed to execute /opt/prefill: Permission denied",
    ],
)
def test_refusal_program_that_was_not_executed_has_nothing_to_do_with_devices(
    dev: Path, detail: str
) -> None:
    """It never got as far as a device."""
    assert refusal(detail, dev=dev, can_open=lambda _: False, memlock_bytes=0) is None


@needs_root
def test_refusal_of_a_process_without_rights_is_the_kernels_own_word(dev: Path) -> None:
    """access(2), groups and limit of a real process of another user."""
    os.chown(dev / "accel/accel0", 0, RENDER)
    (dev / "dri/renderD128").chmod(0o666)
    (dev / "kfd").unlink()
    ask = (
        "import sys; from pathlib import Path; from onebitd.adapters.device_access import refusal\n"
        f"print(refusal({DENIED!r}, dev=Path(sys.argv[1])))"
    )
    said = {}
    for group in (VIDEO, RENDER):
        done = subprocess.run(
            [
                *("prlimit", "--memlock=65536:65536", "setpriv", "--reuid=65534"),
                *("--regid=65534", f"--groups={group}", "--inh-caps=-all"),
                *(sys.executable, "-c", ask, os.fspath(dev)),
            ],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(device_access.__file__).parents[2],
        )
        said[group] = done.stdout
    assert f"may not open {dev}/accel/accel0 (root:{RENDER}, mode 0660)" in said[VIDEO]
    assert "renderD128" not in said[VIDEO]
    assert "may lock 64 KiB of memory" in said[RENDER]
