"""A prefill provider that is a second device: it takes its time, and none of the processor's.

    --tokens IDS --out STATE --model MODEL

The state of these very ids was saved before, by the decoder's own program, and lies in the
directory PACED_STATES under `state_name(IDS' bytes)`. A run lasts PACED_FIXED_MS and
PACED_MS_PER_TOKEN for each id, counted from the start of its process: what the interpreter takes to
start is inside. It copies the file at once, sleeps, and gives it its name at the end, as a device
does that fills its own memory. Status 3 when there is no such state.

It is started without site-packages and imports next to nothing, see `install`.
"""

from __future__ import annotations

import binascii
import os
import sys
import time

TYPE_CHECKING = False  # typing takes longer to load than all the rest
if TYPE_CHECKING:
    from pathlib import Path

NO_STATE = 3


def state_name(ids_file: bytes) -> str:
    """Return the name of the state of these ids, given as the contract's ids file."""
    return f"{ids_file.count(10)}-{binascii.crc32(ids_file):08x}"


def install(directory: Path) -> Path:
    """Write this program into a directory, so that it starts fast; return its path."""
    path = directory / "paced-provider"
    with open(__file__, encoding="utf-8") as source:
        path.write_text(f"#!{sys.executable} -ISB\n{source.read()}")
    path.chmod(0o755)
    return path


def started_s() -> float:
    """Return when this process was started, on CLOCK_BOOTTIME, to a hundredth."""
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def copy(source: str, target: str) -> None:
    """Copy a file inside the kernel."""
    with open(source, "rb") as read, open(target, "wb") as written:
        left = os.fstat(read.fileno()).st_size
        while left:
            left -= os.sendfile(written.fileno(), read.fileno(), None, left)


def main() -> int:
    """Play one run; return its exit status."""
    words = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    environ, out = os.environ, words["--out"]
    with open(words["--tokens"], "rb") as file:
        ids_file = file.read()
    name = state_name(ids_file)
    n_tokens = ids_file.count(10)
    lasts_ms = float(environ["PACED_FIXED_MS"]) + n_tokens * float(environ["PACED_MS_PER_TOKEN"])
    try:
        copy(os.path.join(environ["PACED_STATES"], name), out + ".tmp")
    except FileNotFoundError:
        print(f"no state was saved for these {n_tokens} ids ({name})", file=sys.stderr)
        return NO_STATE
    ends = started_s() + lasts_ms / 1000
    time.sleep(max(0.0, ends - time.clock_gettime(time.CLOCK_BOOTTIME)))
    os.rename(out + ".tmp", out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
