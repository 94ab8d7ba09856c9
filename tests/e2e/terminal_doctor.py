"""Where `onebitctl doctor` is typed: a machine with an NPU and a GPU that are made up.

Doctor takes no other root than `/`, so a `/dev` and a `/sys` of its own are mounted, in which the
nodes are plain files: it opens none. Memory for state files and the limit on locked memory are
those of no machine, too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.e2e.standin_route import DECODER, PATH, quick_provider
from tests.e2e.terminal_place import Place, become, in_sight_of_nothing
from tests.e2e.terminal_screens import AT_80, Desk, Terminal, shots
from tests.standins import tiny_state

_DEVICES: Final = """
mkdir -p /mnt/dev/accel /mnt/dev/dri /mnt/dev/shm /mnt/dev/pts
for node in null zero full tty random urandom; do
    touch /mnt/dev/$node
    mount --bind /dev/$node /mnt/dev/$node
done
mount --rbind /dev/pts /mnt/dev/pts
mount -t tmpfs -o mode=1777,size=64m tmpfs /mnt/dev/shm
ln -s /proc/self/fd /mnt/dev/fd
for node in accel/accel0 dri/renderD128 kfd; do
    touch /mnt/dev/$node
    chown 0:992 /mnt/dev/$node
    chmod 660 /mnt/dev/$node
done
device=/mnt/sys/class/accel/accel0/device
mkdir -p $device/power /mnt/sys/module/amdxdna /mnt/sys/module/amdgpu
echo 1.5.5.391 >$device/fw_version
echo RyzenAI-npu4 >$device/vbnv
echo active >$device/power/runtime_status
echo auto >$device/power/control
echo 0.6.0 >/mnt/sys/module/amdxdna/version
mount --rbind /mnt/dev /dev
mount --bind /mnt/sys /sys
prlimit --pid $$ --memlock=8388608
"""


def desk_of_doctor(desk: Desk, uid: int = 0, *groups: int) -> Desk:
    """Return a desk like another one, on the made-up machine, of a user."""
    who = become(uid, *groups, more=_DEVICES) if uid else in_sight_of_nothing(_DEVICES)
    home = desk.environ["HOME"]
    more = {"PATH": PATH, "STATE_DIRECTORY": home, "RUNTIME_DIRECTORY": f"{home}/onebitd/qwen"}
    return dataclasses.replace(desk, become=who, environ={**desk.environ, **more})


def doctor_beside(
    found: Place, uid: int = 0, *groups: int, terminals: Sequence[Terminal] = (AT_80,)
) -> str:
    """Return what doctor says of a daemon, with the file of an instance that lacks nothing.

    Where the file came from and what the daemon says is held; the groups between are not.
    """
    file = found.home / "qwen.toml"
    if not file.exists():
        write_config(file, found.home)
    words = ["doctor", "--quick", "-i", "qwen", "--config", str(file)]
    desk = desk_of_doctor(found.desk, uid, *groups)

    def ends(text: str) -> str:
        between = r"(?ms)^model$.*?(?=^service$)"
        return re.sub(between, "...\n", of_any_machine(text))

    return found.desk.as_shown(shots(desk, words, terminals, tidy=ends))


def write_config(file: Path, home: Path) -> None:
    """Write the configuration of an instance all of which is in `home`."""
    (home / "tiny.gguf").write_bytes(tiny_state.gguf())
    (home / "llama-server").symlink_to(DECODER)
    quick_provider(home).rename(home / "prefill")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f'[model]\npath = "{home}/tiny.gguf"\n'
        f'[backend]\nllama_server = "{home}/llama-server"\n'
        f'[provider]\nprogram = "{home}/prefill"\n'
        '[handoff]\nstate_dir = "/dev/shm/qwen-slots"\n'
        f'[lock]\npath = "{home}/npu.lock"\n'
        # Nobody has it: the kernel gives no client this one.
        "[http]\nport = 999\n"
    )


def of_any_machine(text: str) -> str:
    """Return a report without pids, times, and this machine's kernel."""
    text = re.sub(r"\b\d[\d.]* (ms|s)\b", r"1 \1", re.sub(r"\b(pid|kill) \d+", r"\1 4100", text))
    return re.sub(r"kernel\s+\d\S*", "kernel 6.18", text)
