"""NPU and GPU nodes, their drivers and firmware, who uses them, and the limit on locked memory.

Everything is read below a root directory, so that a test can bring a tree of its own. Nothing is
opened: that may wake a device, or hang.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from onebitd.adapters import accounts
from onebitd.adapters.device_access import SMALL_BYTES
from onebitd.adapters.lock_probe import command_of
from onebitd.doctor import sight
from onebitd.doctor.finding import Finding, failed, ok, warning
from onebitd.doctor.place import Place, plain
from onebitd.doctor.port import program_name

NO_NODES: Final = "device.nodes"
_NODES: Final = (("accel/accel*", "accel"), ("dri/renderD*", "drm"), ("kfd", "kfd"))
_KERNEL_NAMES: Final = {kind: pattern.rpartition("/")[2] for pattern, kind in _NODES}
_CLASSES: Final = {"accel": "char-accel", "drm": "char-drm", "kfd": "char-kfd"}
_NPU_IDS: Final = frozenset({("0x1022", "0x1502"), ("0x1022", "0x17f0")})
"""PCI vendor and device of the XDNA and XDNA 2 NPUs (amdxdna's table)."""
_NPU_DRIVER: Final = "amdxdna"
_FIRST_KERNEL: Final = "6.14"
"""Of Linux, with that driver."""
_MODULES: Final = (_NPU_DRIVER, "amdgpu")
_NO_IOMMU: Final = frozenset({"amd_iommu=off", "iommu=off"})
"""Words of the kernel's command line with which amdxdna makes no device: it needs shared memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A device node.

    Attributes:
        path: below /dev, as it is called without the test's root.
        kind: `accel`, `drm` or `kfd`.
        can_open: access(2) says that this process may read and write it.
    """

    path: str
    kind: str
    uid: int
    gid: int
    mode: int
    can_open: bool

    @property
    def owner(self) -> str:
        """Owner, group and mode."""
        group = accounts.group_name(self.gid)
        return f"{accounts.user_name(self.uid)}:{group}, mode {self.mode:04o}"

    def is_open_to(self, uid: int, gids: Sequence[int]) -> bool:
        """Tell whether owner, group and mode let somebody read and write it."""
        if uid == 0:
            return True
        shift = 6 if uid == self.uid else 3 if self.gid in gids else 0
        return self.mode >> shift & 0o6 == 0o6


@dataclasses.dataclass(frozen=True, slots=True)
class Who:
    """Whom the devices have to be open to: a user, its groups, and how much it may lock."""

    name: str
    uid: int
    gids: tuple[int, ...]
    memlock_bytes: int

    @classmethod
    def this_process(cls) -> Who:
        """Return who we are; `memlock_bytes` is negative where there is no limit."""
        from onebitd.adapters.device_access import memlock_limit

        gids = (os.getegid(), *os.getgroups())
        return cls(sight.own_name(), os.geteuid(), gids, memlock_limit())


def _may_open(node: Path) -> bool:
    return os.access(node, os.R_OK | os.W_OK, effective_ids=True)


def read_nodes(root: Path = Path("/"), can_open: Callable[[Path], bool] = _may_open) -> list[Node]:
    """Return the nodes that a decoder or a provider may want."""
    found = []
    for pattern, kind in _NODES:
        for path in sorted((root / "dev").glob(pattern)):
            try:
                info = path.stat()
            except OSError:
                continue
            name = f"/{path.relative_to(root)}"
            mode = stat.S_IMODE(info.st_mode)
            found.append(Node(name, kind, info.st_uid, info.st_gid, mode, can_open(path)))
    return found


def _users_of(path: str, root: Path) -> Iterator[str]:
    """Yield who has a node open; other users' processes are seen by root alone."""
    proc = root / "proc"
    with contextlib.suppress(OSError):
        for name in sorted(filter(str.isdigit, os.listdir(proc)), key=int):
            with contextlib.suppress(OSError):
                descriptors = proc / name / "fd"
                if any(os.readlink(descriptors / one) == path for one in os.listdir(descriptors)):
                    yield f"pid {name} ({program_name(command_of(int(name)))})"


def check_users(root: Path = Path("/")) -> list[Finding]:
    """Say who has a node open, and so a context on it; root alone sees everybody."""
    found = []
    for node in read_nodes(root):
        users = list(_users_of(node.path, root))
        if users:
            name = f"device.{Path(node.path).name}.users"
            found.append(ok(name, f"{node.path} is open in {', '.join(users)}"))
    return found


def check(nodes: Sequence[Node], who: Who, place: Place) -> list[Finding]:
    """Look at nodes and limit, which a service may have of its own."""
    return [*judge_nodes(nodes, who, place), judge_memlock(who.memlock_bytes, nodes, place)]


def judge_hidden(inside: Collection[str], outside: Sequence[Node], place: Place) -> list[Finding]:
    """Say which nodes the service does not see.

    Args:
        inside: paths of those that it sees.
    """
    fix = place.drop_in("see-devices", "PrivateDevices=no")
    return [
        failed(_name(node), f"{node.path} is hidden from the service (PrivateDevices=)", fix)
        for node in outside
        if node.path not in inside
    ]


def _name(node: Node) -> str:
    return f"device.{Path(node.path).name}"


def judge_nodes(nodes: Sequence[Node], who: Who, place: Place) -> list[Finding]:
    """Say of each node whether it can be used, and if not which group or rule is missing."""
    if not nodes:
        return [ok(NO_NODES, "no /dev/accel, /dev/dri or /dev/kfd: there is only the CPU")]
    return [_judge_node(node, who, place) for node in nodes]


def _judge_node(node: Node, who: Who, place: Place) -> Finding:
    name = _name(node)
    facts = f"{node.path} ({node.owner})"
    if node.can_open:
        return ok(name, facts)
    if node.is_open_to(who.uid, who.gids):
        rule = f"DeviceAllow={_CLASSES[node.kind]} rw"
        text = f"{facts} is kept from the service by its unit: {rule} is missing, or the driver"
        text += " was loaded after the service was started"
        file = f"devices-{plain(Path(node.path).name)}"
        fix = place.drop_in(file, rule, f"DeviceAllow={node.path} rw")
        return failed(name, text, fix if place.inside else None)
    return failed(name, *_closed(node, facts, who, place))


def _closed(node: Node, facts: str, who: Who, place: Place) -> tuple[str, str]:
    text = f"{facts} is closed to the user {who.name}"
    group = accounts.group_name(node.gid)
    if node.mode >> 3 & 0o6 == 0o6 and node.gid != 0:
        text += f", which is not in the group {group}"
        return text, place.join(group, who.name)
    text += ", and no group would help: a udev rule has to give it to one"
    which = f'SUBSYSTEM=="{node.kind}", KERNEL=="{_KERNEL_NAMES[node.kind]}"'
    rule = f'{which}, GROUP="render", MODE="0660"'
    return text, (
        f"echo '{rule}' |\n  {place.sudo}tee /etc/udev/rules.d/70-{node.kind}.rules\n"
        f"{place.sudo}udevadm control --reload && {place.sudo}udevadm trigger"
    )


def judge_memlock(limit: int, nodes: Sequence[Node], place: Place) -> Finding:
    """Say whether as much memory may be locked as amdxdna pins.

    Args:
        limit: bytes, negative for any amount.
    """
    name = "device.memlock"
    if limit < 0:
        return ok(name, "any amount of memory may be locked")
    size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit >> 10} KiB"
    text = f"{size} of memory may be locked (RLIMIT_MEMLOCK)"
    if not any(node.kind == "accel" for node in nodes):
        return ok(name, f"{text}, and no NPU needs more")
    fix = place.drop_in("memlock", "LimitMEMLOCK=infinity")
    if place.scope == "user":
        fix = place.users_limit("LimitMEMLOCK=infinity")
    if not place.inside:
        fix = f"{place.sudo}prlimit --memlock=unlimited --pid $$"
    if limit < SMALL_BYTES:
        return failed(name, f"{text}: an NPU's driver pins {SMALL_BYTES >> 20} MiB at once", fix)
    return warning(name, f"{text}: an NPU's driver pins all that it computes with", fix)


def check_drivers(nodes: Sequence[Node], place: Place, root: Path = Path("/")) -> list[Finding]:
    """Say which drivers are loaded, of which version, and what they say of the NPU.

    Not from inside a service, which may see neither the nodes nor the kernel's modules.
    """
    found = [
        ok(f"device.{module}", _module_text(module, root))
        for module in _MODULES
        if (root / "sys/module" / module).is_dir()
    ]
    if not any(node.kind == "accel" for node in nodes) and _has_npu(root):
        found.append(_without_node(place, root))
    npus = [node for node in nodes if node.kind == "accel"]
    classes = root / "sys/class/accel"
    return found + [_npu(classes / Path(node.path).name / "device", node) for node in npus]


def _without_node(place: Place, root: Path) -> Finding:
    """Say why an NPU has no node."""
    name, text = "device.npu", "this machine has an NPU, and no /dev/accel"
    kernel = _text(root / "proc/sys/kernel/osrelease")
    modules = root / "lib/modules" / kernel
    is_in_kernel = f"/{_NPU_DRIVER}.ko" in _text(modules / "modules.builtin")
    if is_in_kernel or (root / "sys/module" / _NPU_DRIVER).is_dir():
        text += f": its driver {_NPU_DRIVER} is loaded and has made no device"
        refused = sorted(_NO_IOMMU.intersection(_text(root / "proc/cmdline").split()))
        if refused:
            text += f", which takes the IOMMU: the kernel was started with {' '.join(refused)}"
        fix = f"{place.sudo}dmesg | grep -iE '{_NPU_DRIVER}|iommu'"
        return warning(name, text, fix)
    listed = _text(modules / "modules.dep")
    if listed and f"/{_NPU_DRIVER}.ko" not in listed:
        text += f": the kernel {kernel} has no driver {_NPU_DRIVER}, Linux {_FIRST_KERNEL} has it"
        return warning(name, text)
    text += f": its driver {_NPU_DRIVER} is not loaded"
    return warning(name, text, f"{place.sudo}modprobe {_NPU_DRIVER}")


def _module_text(module: str, root: Path) -> str:
    version = _text(root / "sys/module" / module / "version")
    kernel = _text(root / "proc/sys/kernel/osrelease") or "unknown"
    return f"{module} {version}, kernel {kernel}" if version else f"{module} of kernel {kernel}"


def _has_npu(root: Path) -> bool:
    return any(
        (_text(path / "vendor"), _text(path / "device")) in _NPU_IDS
        for path in (root / "sys/bus/pci/devices").glob("*")
    )


def _npu(device: Path, node: Node) -> Finding:
    name = f"device.{Path(node.path).name}.firmware"
    firmware = _text(device / "fw_version")
    words = [_text(device / "vbnv") or "accelerator"]
    words.append(f"firmware {firmware}" if firmware else "its firmware's version is not told")
    status, control = _text(device / "power/runtime_status"), _text(device / "power/control")
    if status:
        words.append(f"power {status}{f' ({control})' if control else ''}")
    text = ", ".join(words)
    return warning(name, text) if status == "error" else ok(name, text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
