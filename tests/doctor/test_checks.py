"""What the checks make of what they read: tables, and trees in the place of /dev, /proc, /sys."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from onebitd.adapters import lock_probe
from onebitd.adapters.lock_probe import LockHolder, LockStatus
from onebitd.core import gguf_header
from onebitd.core.gguf_header import GgufHeader
from onebitd.doctor import devices, lock, model, port, program, sight, space, unit
from onebitd.doctor.devices import Node, Who
from onebitd.doctor.finding import State
from onebitd.doctor.place import Place
from onebitd.doctor.port import Listener, Ours, Owner
from onebitd.doctor.sight import Step
from onebitd.doctor.space import Room
from tests.standins import tiny_state

INSIDE = Place("q", "system", inside=True, is_root=True)
HERE = Place("q")
HOME = "/home" + "/ann"

# -- paths


def test_look_names_the_directory_that_denies(tmp_path: Path) -> None:
    """Not the file, which nobody has seen, but the first directory without a way in."""
    (tmp_path / "shut").mkdir()
    file = tmp_path / "shut" / "model.gguf"
    file.write_bytes(b"x")
    assert sight.look(str(file)) is None
    missing = sight.look(str(tmp_path / "gone" / "model.gguf"))
    assert missing == Step(str(tmp_path / "gone"), "missing")


@pytest.mark.parametrize(
    ("path", "step", "hidden"),
    [
        (f"{HOME}/m.gguf", Step("/home", "denied", "root", "root", 0, is_directory=True), True),
        (f"{HOME}/m.gguf", Step(HOME, "denied", "ann", "ann", 0o700, is_directory=True), False),
        ("/srv/m.gguf", Step("/srv", "denied", "root", "root", 0, is_directory=True), False),
    ],
)
def test_is_sandboxed_by_the_empty_directory_of_protect_home(
    path: str, step: Step, hidden: bool
) -> None:
    """A home directory that somebody has shut himself is none of the sandbox's doing."""
    assert sight.is_sandboxed(path, step) is hidden


def test_show_fix_lets_the_service_see_that_directory_and_no_other() -> None:
    """Below a home directory the rest of it stays out of sight."""
    fix = sight.show_fix(INSIDE, f"{HOME}/models/m.gguf")
    assert f"BindReadOnlyPaths={HOME}/models" in fix
    assert "ProtectHome=tmpfs" in fix
    assert "ProtectHome" not in sight.show_fix(INSIDE, "/data/m.gguf")


# -- model


def gguf(**values: int | list[int]) -> bytes:
    """Return a header of architecture `llama` with these keys."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    for key, value in values.items():
        pairs += text(f"llama.{key.replace('__', '.')}")
        if isinstance(value, list):
            pairs += struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)
        else:
            pairs += struct.pack("<II", 4, value)
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(values) + 1) + pairs


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {
                "block_count": 30,
                "embedding_length": 576,
                "attention__head_count": 9,
                "attention__head_count_kv": 3,
            },
            30 * 3 * (64 + 64) * 2,
        ),
        (
            {
                "block_count": 2,
                "attention__head_count": 4,
                "attention__head_count_kv": [1, 3],
                "attention__key_length": 16,
                "attention__value_length": 8,
            },
            (1 + 3) * (16 + 8) * 2,
        ),
        ({"block_count": 2}, None),
        ({}, None),
    ],
)
def test_bytes_per_token_is_what_the_heads_take(
    values: dict[str, int | list[int]], expected: int | None
) -> None:
    """16 bits for each value of K and V, of every layer; None where the header is silent."""
    metadata = gguf_header.read_metadata(gguf(**values))
    assert model.bytes_per_token(metadata) == expected


def header(**values: object) -> GgufHeader:
    """Return a header with these values beside ordinary ones."""
    ordinary: dict[str, object] = {
        "version": 3,
        "architecture": "llama",
        "name": None,
        "block_count": 2,
        "context_length": 2048,
        "sliding_window": None,
        "is_recurrent": False,
        "is_hybrid": False,
        "n_vocab": 32,
        "nextn_predict_layers": 0,
    }
    return GgufHeader(**{**ordinary, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "ctx_size", "state", "word"),
    [
        ({}, None, State.OK, "trained on 2048 tokens"),
        ({}, 2048, State.OK, "llama"),
        ({}, 4096, State.WARNING, "4096"),
        ({"is_recurrent": True}, None, State.WARNING, "recurrent state"),
        ({"is_hybrid": True}, None, State.WARNING, "recurrent part"),
        ({"sliding_window": 512}, None, State.OK, "sliding window of 512"),
    ],
)
def test_model_header_says_what_is_in_the_way(
    values: dict[str, object], ctx_size: int | None, state: State, word: str
) -> None:
    """A context beyond the trained one, and states that few providers can make."""
    found = model.judge(header(**values), ctx_size, INSIDE)
    assert (found.state, word in found.message) == (state, True)


def test_model_that_is_no_gguf_has_failed(tmp_path: Path) -> None:
    """It says so, and does not go on to its header."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\3\4, a zip file")
    findings, found = model.check(str(path), None, HERE)
    assert [(one.name, one.state) for one in findings] == [("model.file", State.FAILED)]
    assert found is None
    path.write_bytes(tiny_state.gguf())
    findings, found = model.check(str(path), None, HERE)
    assert [one.state for one in findings] == [State.OK, State.OK]
    assert found is not None


# -- programs


@pytest.mark.parametrize(
    ("head", "missing"),
    [
        (b"#!/bin/sh\n", None),
        (b"#! /usr/bin/env sh\n", None),
        (b"#!/usr/bin/env -S sh -e\n", None),
        (b"#!/opt/gone/bin/python3\n", "/opt/gone/bin/python3"),
        (b"#!/usr/bin/env no-such-program\n", "no-such-program (by /usr/bin/env)"),
        (b"\x7fELF", None),
        (b"", None),
    ],
)
def test_missing_interpreter_is_that_of_the_first_line(head: bytes, missing: str | None) -> None:
    """What a kernel calls "No such file or directory" has a name."""
    assert program.missing_interpreter(head, "/usr/bin:/bin") == missing


@pytest.mark.parametrize(
    ("status", "said", "word"),
    [
        (
            127,
            "x: error while loading shared libraries: libggml.so.0: cannot open shared object"
            " file: No such file or directory",
            "misses the library libggml.so.0",
        ),
        (
            1,
            "x: /lib/libc.so.6: version `GLIBC_2.99' not found (required by x)",
            "GLIBC_2.99",
        ),
        (
            127,
            "x: error while loading shared libraries: libamdhip64.so: cannot enable executable"
            " stack as shared object requires: Permission denied",
            "MemoryDenyWriteExecute",
        ),
        (-4, "", "signal 4"),
        (126, "Permission denied", "Permission denied"),
        (0, "version: 10068 (abc)", None),
        (1, "unknown argument", None),
    ],
)
def test_load_problem_names_what_a_program_lacks(status: int, said: str, word: str | None) -> None:
    """A library, a symbol, memory that may be executed; anything else is not about its start."""
    found = program.load_problem("decoder.program", "/x", status, said, INSIDE)
    assert (found is None) if word is None else (found is not None and word in found.message)


def test_load_problem_outside_of_a_service_is_not_its_sandbox() -> None:
    """A newer glibc refuses such a library wherever it is."""
    said = "x: error while loading shared libraries: libx.so: cannot enable executable stack"
    found = program.load_problem("decoder.program", "/x", 127, said, HERE)
    assert found is not None
    assert "cannot enable executable stack" in found.message
    assert "MemoryDeny" not in f"{found.message}{found.fix}"


# -- lock


def lock_status(**values: object) -> LockStatus:
    """Return a free lock that is in order, but for these values."""
    ordinary = {"path": "/tmp/l", "exists": True, "held": False, "holder": None, "problem": None}
    return LockStatus(**{**ordinary, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "state", "word"),
    [
        ({}, State.OK, "free"),
        ({"held": True, "holder": LockHolder(7, "engine", None)}, State.OK, "pid 7 (engine)"),
        ({"held": True}, State.OK, "cannot be seen"),
        ({"exists": False}, State.WARNING, "does not exist"),
        ({"problem": "it is a fifo", "usable": False}, State.FAILED, "fifo"),
        ({"problem": "it belongs to uid 7"}, State.WARNING, "uid 7"),
    ],
)
def test_lock_says_what_its_file_is_like(
    values: dict[str, object], state: State, word: str
) -> None:
    """Held is no fault; a file that keeps others or us out is."""
    found = lock.judge(lock_status(**values), INSIDE)
    assert (found.state, word in found.message) == (state, True)


def test_lock_of_another_group_is_put_right_by_joining_it(tmp_path: Path) -> None:
    """What the probe says of a file of the group render is what the command is about."""
    path = tmp_path / "lock"
    path.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock_probe, "_own_groups", lambda: {0})
        patch.setattr(
            os, "stat", lambda *_a, **_k: os.stat_result((0o100660, 0, 0, 1, 0, 44, *[0] * 4))
        )
        problem = f"it {lock_probe.why_denied(str(path))}"
    status = lock_status(problem=problem, usable=False)
    inside, here = lock.judge(status, INSIDE).fix, lock.judge(status, HERE).fix
    assert inside is not None
    assert "SupplementaryGroups=" in inside
    assert here is not None
    assert "usermod -aG" in here


def test_lock_directory_of_the_service_is_compared(tmp_path: Path) -> None:
    """Another directory than everybody's is a failure, the same one is in order."""
    info = tmp_path.stat()
    same = lock.compare([str(tmp_path), info.st_dev, info.st_ino], INSIDE)
    other = lock.compare([str(tmp_path), info.st_dev, info.st_ino + 1], INSIDE)
    assert same is not None
    assert same.state is State.OK
    assert other is not None
    assert other.state is State.FAILED
    assert other.fix is not None
    assert "PrivateTmp=no" in other.fix
    assert lock.compare(None, INSIDE) is None


# -- devices


def node(**values: object) -> Node:
    """Return an NPU's node of the group 44 that may be opened, but for these values."""
    ordinary: dict[str, object] = {
        "path": "/dev/accel/accel0",
        "kind": "accel",
        "uid": 0,
        "gid": 44,
        "mode": 0o660,
        "can_open": True,
    }
    return Node(**{**ordinary, **values})  # type: ignore[arg-type]


WHO = Who("onebitd", 990, (990,), -1)


@pytest.mark.parametrize(
    ("values", "who", "state", "words", "fix"),
    [
        ({}, WHO, State.OK, "/dev/accel/accel0", None),
        ({"can_open": False}, WHO, State.FAILED, "not in the group", "SupplementaryGroups="),
        (
            {"can_open": False, "gid": 0},
            WHO,
            State.FAILED,
            "no group would help",
            'SUBSYSTEM=="accel"',
        ),
        (
            {"can_open": False, "mode": 0o600},
            WHO,
            State.FAILED,
            "no group would help",
            "udevadm trigger",
        ),
        (
            {"can_open": False},
            Who("onebitd", 990, (990, 44), -1),
            State.FAILED,
            "kept from the service by its unit",
            "DeviceAllow=char-accel rw",
        ),
        (
            {"can_open": False, "mode": 0o666, "kind": "kfd", "path": "/dev/kfd"},
            WHO,
            State.FAILED,
            "DeviceAllow=char-kfd rw",
            "DeviceAllow=/dev/kfd rw",
        ),
    ],
)
def test_device_that_is_closed_says_why_and_what_opens_it(
    values: dict[str, object], who: Who, state: State, words: str, fix: str | None
) -> None:
    """The group, a udev rule, or the unit's device rules."""
    (found,) = devices.judge_nodes([node(**values)], who, INSIDE)
    assert (found.state, words in found.message) == (state, True)
    assert (found.fix is None) if fix is None else (found.fix is not None and fix in found.fix)


def test_device_rule_of_udev_leaves_other_nodes_alone() -> None:
    """A display's card is in the subsystem of the node that computes, and in another group."""
    shut = node(path="/dev/dri/renderD128", kind="drm", can_open=False, mode=0o600)
    (found,) = devices.judge_nodes([shut], WHO, INSIDE)
    assert 'SUBSYSTEM=="drm", KERNEL=="renderD*", GROUP=' in (found.fix or "")


def test_device_closed_to_a_user_is_put_right_by_usermod() -> None:
    """Outside of a service it is the user who joins a group."""
    (found,) = devices.judge_nodes([node(can_open=False)], Who("ann", 1000, (1000,), -1), HERE)
    assert found.fix is not None
    assert "usermod -aG" in found.fix


@pytest.mark.parametrize(
    ("limit", "nodes", "state"),
    [
        (-1, [node()], State.OK),
        (8 << 20, [node()], State.FAILED),
        (1 << 30, [node()], State.WARNING),
        (8 << 20, [], State.OK),
        (8 << 20, [node(kind="drm", path="/dev/dri/renderD128")], State.OK),
    ],
)
def test_memlock_matters_where_there_is_an_npu(limit: int, nodes: list[Node], state: State) -> None:
    """amdxdna pins what it computes with; a GPU does not count against the limit."""
    assert devices.judge_memlock(limit, nodes, INSIDE).state is state


def tree(root: Path, files: dict[str, str]) -> Path:
    """Make files below a root directory."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_drivers_firmware_and_power_are_read_from_sysfs(tmp_path: Path) -> None:
    """What the kernel tells of an NPU, from a tree in the place of /."""
    npu = "sys/class/accel/accel0/device"
    root = tree(
        tmp_path,
        {
            "dev/accel/accel0": "",
            "dev/dri/renderD128": "",
            "sys/module/amdxdna/version": "2.19.0\n",
            "sys/module/amdgpu/uevent": "",
            "proc/sys/kernel/osrelease": "6.14.2\n",
            f"{npu}/fw_version": "1.5.2.380\n",
            f"{npu}/vbnv": "RyzenAI-npu5\n",
            f"{npu}/power/runtime_status": "suspended\n",
            f"{npu}/power/control": "auto\n",
        },
    )
    nodes = devices.read_nodes(root)
    assert [one.path for one in nodes] == ["/dev/accel/accel0", "/dev/dri/renderD128"]
    said = {one.name: one.message for one in devices.check_drivers(nodes, INSIDE, root)}
    assert said == {
        "device.amdxdna": "amdxdna 2.19.0, kernel 6.14.2",
        "device.amdgpu": "amdgpu of kernel 6.14.2",
        "device.accel0.firmware": ("RyzenAI-npu5, firmware 1.5.2.380, power suspended (auto)"),
    }


LOADED = {"sys/module/amdxdna/uevent": ""}
MODULES = "lib/modules/6.14.2"
AMDXDNA = "kernel/drivers/accel/amdxdna/amdxdna.ko.xz:\n"
DMESG = "dmesg | grep -iE 'amdxdna|iommu'"


@pytest.mark.parametrize(
    ("files", "words", "fix"),
    [
        ({}, "is not loaded", "modprobe amdxdna"),
        ({f"{MODULES}/modules.dep": AMDXDNA}, "is not loaded", "modprobe amdxdna"),
        (
            {f"{MODULES}/modules.dep": "kernel/fs/xfs.ko:\n"},
            "the kernel 6.14.2 has no driver amdxdna",
            None,
        ),
        ({f"{MODULES}/modules.builtin": AMDXDNA}, "is loaded and has made no device", DMESG),
        (LOADED, "is loaded and has made no device", DMESG),
        ({**LOADED, "proc/cmdline": "ro iommu=pt quiet\n"}, "has made no device", DMESG),
        ({**LOADED, "proc/cmdline": "ro amd_iommu=off\n"}, "started with amd_iommu=off", DMESG),
        ({**LOADED, "proc/cmdline": "iommu=off ro\n"}, "started with iommu=off", DMESG),
    ],
)
def test_npu_without_a_node_says_what_its_driver_lacks(
    tmp_path: Path, files: dict[str, str], words: str, fix: str | None
) -> None:
    """The PCI device is there, and nothing to open: no driver, not loaded, or loaded in vain."""
    place = "sys/bus/pci/devices/0000:c5:00.1"
    pci = {f"{place}/vendor": "0x1022\n", f"{place}/device": "0x17f0\n"}
    root = tree(tmp_path, {**pci, "proc/sys/kernel/osrelease": "6.14.2\n", **files})
    found = devices.check_drivers([], INSIDE, root)[-1]
    assert (found.name, found.state) == ("device.npu", State.WARNING)
    assert words in found.message
    assert ("started with" in found.message) == ("off" in files.get("proc/cmdline", ""))
    assert found.fix == fix
    found = devices.check_drivers([node()], INSIDE, root)[-1]
    assert (found.name, found.state) == ("device.accel0.firmware", State.OK)


def test_users_of_a_node_are_found_in_proc(tmp_path: Path) -> None:
    """Whoever has it open is named, without its arguments."""
    root = tree(tmp_path, {"dev/kfd": ""})
    own = root / "proc" / str(os.getpid()) / "fd"
    own.mkdir(parents=True)
    (own / "7").symlink_to("/dev/kfd")
    (found,) = devices.check_users(root)
    assert found.name == "device.kfd.users"
    assert found.message.startswith(f"/dev/kfd is open in pid {os.getpid()} (")


# -- port

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 0
   1: 00000000:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 12 1 0
   2: 0100007F:1F40 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 13 1 0
"""
TABLE6 = """\
   0: 00000000000000000000000001000000:1F40 00000000000000000000000000000000:0 0A 0:0 0:0 0 0 0 14
"""


def test_port_table_holds_the_listening_sockets() -> None:
    """Of both families; connections are none."""
    assert port.parse_table(TABLE) == [
        Listener("127.0.0.1", 8000, 11),
        Listener("0.0.0.0", 80, 12),  # noqa: S104 - what the table says
    ]
    assert port.parse_table(TABLE6.replace("14\n", "14 1\n")) == [Listener("::1", 8000, 14)]


@pytest.mark.parametrize(
    ("host", "number", "inodes"),
    [
        ("127.0.0.1", 8000, [11]),
        ("localhost", 8000, [11]),
        ("::1", 8000, []),
        ("0.0.0.0", 8000, [11]),  # noqa: S104 - a setting
        ("127.0.0.1", 80, [12]),
        ("box.lan", 8000, [11]),
        ("127.0.0.1", 8001, []),
    ],
)
def test_port_in_the_way_is_a_matter_of_addresses(
    host: str, number: int, inodes: list[int]
) -> None:
    """Another address is no obstacle, any address is one to all."""
    found = port.in_the_way(port.parse_table(TABLE), host, number)
    assert [one.inode for one in found] == inodes


@pytest.mark.parametrize(
    ("owners", "ours", "state", "fix"),
    [
        ([Owner(7, "x", "")], Ours(7), State.OK, None),
        ([Owner(7, "x", "onebitd@q.service")], Ours(), State.OK, None),
        ([Owner(7, "x", "onebitd@q.service", True)], Ours(), State.FAILED, "kill 7"),
        ([Owner(1, "systemd", "init.scope")], Ours(), State.FAILED, "systemctl list-sockets"),
        ([Owner(7, "nginx", "nginx.service")], Ours(), State.FAILED, "systemctl stop nginx"),
        ([Owner(7, "chat", "chat.service", True)], Ours(), State.FAILED, "kill 7"),
        ([Owner(7, "nc -l 8000")], Ours(), State.FAILED, "kill 7"),
        ([], Ours(), State.FAILED, None),
    ],
)
def test_port_owner_decides_what_is_said(
    owners: list[Owner], ours: Ours, state: State, fix: str | None
) -> None:
    """The instance's own daemon or socket is fine, anybody else is in the way."""
    found = port.judge("127.0.0.1:8000", owners, ours, INSIDE)
    assert found.state is state
    assert (found.fix is None) if fix is None else (found.fix is not None and fix in found.fix)


@pytest.mark.parametrize(
    ("status", "runs", "state"),
    [
        ({"pid": 7, "listen": ["127.0.0.1:8000"]}, True, State.OK),
        ({"pid": 7, "listen": ["127.0.0.1:8001", "unix:/run/x"]}, True, State.SKIPPED),
        (None, True, State.SKIPPED),
        (None, False, State.FAILED),
    ],
)
def test_port_whose_owner_is_hidden_is_the_daemons_if_it_says_so(
    status: dict[str, object] | None, runs: bool, state: State
) -> None:
    """Only root sees who has a socket: a service that runs is not told to end itself."""
    found = port.judge("127.0.0.1:8000", [], Ours.of(status, runs=runs), Place("q", "system"))
    assert found.state is state
    assert found.fix == (None if state is State.OK else "sudo onebitctl -i q doctor")


def test_port_of_a_users_service_is_freed_with_their_own_manager() -> None:
    """The system's manager does not know that service, and root is not that manager's user."""
    owner = Owner(7, "chat", "chat.service", of_user=True)
    found = port.judge("127.0.0.1:8000", [owner], Ours(), Place("q"))
    assert found.fix == "systemctl --user stop chat.service"


def test_port_message_keeps_arguments_to_itself() -> None:
    """A command line may hold a key."""
    owner = Owner(7, "/usr/bin/serve --api-key sesame --port 8000", "")
    found = port.judge("127.0.0.1:8000", [owner], Ours(), INSIDE)
    assert "serve" in found.message
    assert "sesame" not in f"{found.message}{found.fix}"


# -- space

MOUNTS = """\
21 1 8:1 / / rw - ext4 /dev/sda1 rw
22 21 0:20 / /run rw - tmpfs tmpfs rw
23 22 0:21 / /run/user/7 rw - tmpfs tmpfs rw
24 21 0:22 / /mnt/my\\040disk rw - xfs /dev/sdb rw
25 22 0:20 /onebitd/q /run/onebitd/q rw - tmpfs tmpfs rw
26 21 0:23 /@data /data rw - btrfs /dev/sdc rw
"""


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/run/onebitd/q", ("/run", "tmpfs")),
        ("/runaway", ("/", "ext4")),
        ("/run/user/7/x", ("/run/user/7", "tmpfs")),
        ("/data/x", ("/data", "btrfs")),
        ("/mnt/my disk/x", ("/mnt/my disk", "xfs")),
        ("/run/onebitd/q/slots", ("/run", "tmpfs")),
    ],
)
def test_mount_of_a_path_is_the_nearest(path: str, found: tuple[str, str]) -> None:
    """By components of the path, blanks included; a sandbox's own mount is no place to resize."""
    assert space.mount_of(path, MOUNTS) == found


@pytest.mark.parametrize(
    ("kind", "free_mib", "ctx_size", "state", "word"),
    [
        ("tmpfs", 1000, 8192, State.OK, "180 MiB"),
        ("tmpfs", 100, 8192, State.WARNING, "no_space"),
        ("ext4", 1000, 8192, State.WARNING, "on a disk"),
        ("tmpfs", 1000, None, State.SKIPPED, "not known"),
    ],
)
def test_space_is_held_against_the_longest_prompt(
    kind: str, free_mib: int, ctx_size: int | None, state: State, word: str
) -> None:
    """A state that does not fit, or a slow disk, costs handoffs."""
    room = Room("/run/onebitd/q/slots", kind, "/run", free_mib << 20, 2000 << 20)
    found = space.judge(room, ctx_size, 23040, INSIDE)
    assert (found.state, word in found.message) == (state, True)


# -- unit

SHOWN = {
    "LoadState": "loaded",
    "UnitFileState": "enabled",
    "ActiveState": "active",
    "NRestarts": "0",
    "NeedDaemonReload": "no",
    "WatchdogUSec": "30s",
    "TimeoutStopUSec": "1min 30s",
    "TimeoutStartUSec": "12min",
}
FACTS = {"drain_timeout_s": 60.0, "load_timeout_s": 600.0}


@pytest.mark.parametrize(
    ("changes", "facts", "name", "state"),
    [
        ({}, {}, "service", State.OK),
        ({"UnitFileState": "disabled"}, {}, "service", State.WARNING),
        ({"UnitFileState": "masked", "LoadState": "masked"}, {}, "service", State.FAILED),
        ({"ActiveState": "failed"}, {}, "service", State.FAILED),
        ({"NRestarts": "4"}, {}, "service", State.WARNING),
        ({"NeedDaemonReload": "yes"}, {}, "service.reload", State.WARNING),
        ({"WatchdogUSec": "0"}, {}, "service.watchdog", State.WARNING),
        ({}, {"drain_timeout_s": 300.0}, "service.stop", State.WARNING),
        ({"TimeoutStopUSec": "infinity"}, {"drain_timeout_s": 300.0}, "service", State.OK),
        ({}, {"load_timeout_s": 3600.0}, "service.start", State.WARNING),
    ],
)
def test_unit_says_what_is_odd_about_it(
    changes: dict[str, str], facts: dict[str, float], name: str, state: State
) -> None:
    """State, reload, watchdog, and times that do not fit the configuration."""
    found = unit.judge({**SHOWN, **changes}, [], {**FACTS, **facts}, INSIDE)
    assert (found[-1].name, found[-1].state) == (name, state)
    assert len(found) <= 2


def test_unit_masked_drop_in_is_found(tmp_path: Path) -> None:
    """A link to /dev/null hides a file of the same name elsewhere."""
    directory = tmp_path / "onebitd@q.service.d"
    directory.mkdir()
    (directory / "lan.conf").symlink_to("/dev/null")
    (directory / "other.conf").write_text("")
    masked = unit.masked_drop_ins(INSIDE, [tmp_path])
    assert masked == [str(directory / "lan.conf")]
    found = unit.judge(SHOWN, masked, FACTS, INSIDE)
    assert found[-1].name == "service.drop-in"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1min 30s", 90.0), ("2h 5min", 7500.0), ("500ms", 0.5), ("0", 0.0), ("infinity", None)],
)
def test_unit_seconds_reads_systemds_time_spans(text: str, expected: float | None) -> None:
    """As `systemctl show` prints them."""
    assert unit.seconds(text) == expected
