"""Install the heavy clients of tests/e2e/test_clients.py and tests/fuzz below `.venv/clients/`.

    python -m tests.tools.fetch_clients

They stay out of the environment: 300 MB with what they need, of which nothing else may come to
depend. What is there is left alone as long as the recipe is the same. Where they cannot be had, the
tests that need them are skipped, so this says why and ends with status 0; under CI=true with 1.
Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.llama_builds import ROOT

FOLDER = ROOT / ".venv" / "clients"
CLIENTS = ("langchain-openai==1.7.4", "litellm==1.110.2", "schemathesis==4.32.5")
STAMP = "recipe.txt"
RECIPE = f"{' '.join(CLIENTS)} on Python {sys.version_info[0]}.{sys.version_info[1]}\n"


def say(line: str) -> None:
    """Report progress: it takes half a minute."""
    print(f"fetch_clients: {line}", file=sys.stderr, flush=True)


def is_installed() -> bool:
    """Return whether the clients are there, whole and of this recipe."""
    try:
        return (FOLDER / STAMP).read_text() == RECIPE
    except OSError:
        return False


def install() -> str | None:
    """Install them; return why they cannot be, None when they are there."""
    say(f"installing {', '.join(CLIENTS)}")
    part = FOLDER.with_name(FOLDER.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    # Byte code is made by the first import: that needs a tenth of the modules.
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command += ["--no-compile", "--only-binary", ":all:", "--target", str(part)]
    done = subprocess.run([*command, *CLIENTS], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return (errors or done.stderr.splitlines() or ["pip said nothing"])[-1]
    (part / STAMP).write_text(RECIPE)
    shutil.rmtree(FOLDER, ignore_errors=True)
    part.rename(FOLDER)
    return None


def main() -> int:
    """Install what is missing; 0, or 1 with one line on stderr."""
    with Path(f"{FOLDER}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once: the second finds everything there
        problem = None if is_installed() else install()
    if problem is None:
        return 0
    say(f"the tests with litellm, LangChain and schemathesis are left out: {problem}")
    return 1 if os.environ.get("CI") == "true" else 0


if __name__ == "__main__":
    sys.exit(main())
