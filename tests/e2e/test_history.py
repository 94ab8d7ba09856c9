"""The history of a real daemon: over restarts and kills, on a damaged file and on a full disk."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebitd.adapters.history_store import HistoryFileError, read_records
from onebitd.core.handoff_filter import HandoffFilter
from tests.e2e.standin_route import Route, quick_provider, running_route
from tests.harness import wait_until

WORDS = [" ".join(f"{name}{number}" for number in range(9)) for name in ("alpha", "beta")]


@contextlib.contextmanager
def running(state: Path, provider: Path) -> Iterator[Route]:
    """Run a daemon with this state directory."""
    with running_route(env={"STATE_DIRECTORY": str(state)}, provider=provider) as route:
        yield route


def in_file(state: Path) -> list[str]:
    """Return the request ids that somebody finds in the file, [] while there is none."""
    with contextlib.suppress(HistoryFileError):
        found = read_records(str(state / "history.db"), HandoffFilter())
        return [one["request_id"] for one in found]
    return []


def chat(route: Route, content: str, request_id: str, how: str = "never") -> None:
    """Have one chat served; without a handoff that takes no time."""
    headers = {"X-Request-Id": request_id, "X-Onebit-Handoff": how}
    assert route.daemon.chat(content, headers=headers).status == 200


def shown(route: Route) -> list[str]:
    """Return the request ids that the daemon shows."""
    return [one["request_id"] for one in route.daemon.handoffs()]


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick stand-in."""
    return quick_provider(tmp_path_factory.mktemp("provider"))


def test_history_restarted_and_killed_daemon_has_what_was_before(
    tmp_path: Path, provider: Path
) -> None:
    """A stop keeps all, a SIGKILL all but the last second; prompts are told apart by a hash."""
    state = tmp_path / "state"
    with running(state, provider) as route:
        for number, content in enumerate((WORDS[0], WORDS[1], WORDS[0])):
            chat(route, content, f"first-{number}", "always")
        before = route.daemon.handoffs()
    hashes = [one["prompt_hash"] for one in before]
    assert hashes[0] == hashes[2] != hashes[1]
    assert in_file(state) == ["first-0", "first-1", "first-2"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in state.iterdir()} == {0o600}
    data = b"".join(file.read_bytes() for file in state.glob("history.*"))
    assert b"alpha" not in data

    finished: dict[str, float] = {}
    with running(state, provider) as route:
        assert route.daemon.handoffs() == before
        assert route.daemon.control("/v1/handoffs/summary")["count"] == 3
        assert route.daemon.status()["handoffs"]["used"] == 0
        chat(route, WORDS[0], "second-0", "always")
        assert route.daemon.last_handoff(4)["prompt_hash"] == hashes[0]
        begun = time.monotonic()
        while time.monotonic() < begun + 1.5:
            name = f"second-{len(finished) + 1}"
            chat(route, WORDS[1], name)
            finished[name] = time.monotonic()
        route.daemon.kill()
    end = time.monotonic()
    kept = in_file(state)
    assert [name for name, moment in finished.items() if moment < end - 1 - 0.2] == [
        name for name in kept if finished.get(name, end) < end - 1 - 0.2
    ]
    with running(state, provider) as route:
        assert shown(route)[: len(kept)] == kept


def telltale_provider(directory: Path, quick: Path) -> Path:
    """Return a provider that prints what is in a file `say` beside it, and the ids, and fails."""
    program = directory / "telltale"
    program.write_text(
        f"""#!/bin/sh
[ -e {directory}/say ] || exec {quick} "$@"
echo "cannot read '$(cat {directory}/say)', ids $(paste -sd, "$2")" >&2
exit 3
"""
    )
    program.chmod(0o755)
    return program


def test_history_has_no_words_of_provider_decoder_or_client(tmp_path: Path, provider: Path) -> None:
    """They may be a prompt: the daemon that heard them shows them, the file never has them."""
    state, say, prompt = tmp_path / "state", tmp_path / "say", WORDS[0]
    with running(state, telltale_provider(tmp_path, provider)) as route:
        say.write_text(prompt)
        for request_id in ("exit-0", "exit-1", "exit-2", "open"):
            chat(route, prompt, request_id, "always")
        say.unlink()
        route.daemon.reset_provider()
        route.daemon.chat(prompt, headers={"X-Request-Id": "client"}, n=prompt)
        route.behave(decoder="--restore-refuse")
        chat(route, prompt, "refused", "always")
        route.behave(decoder="--reply-500-after-restore")
        chat(route, prompt, "error", "always")
        route.behave(decoder=f"--crash-on completion:1 --count-file {tmp_path / 'count'}")
        chat(route, prompt, "died", "always")
        live = {one["request_id"]: one["detail"] for one in route.daemon.handoffs()}
        wait_until(lambda: in_file(state) == list(live), "all are in the file")
        data = b"".join(file.read_bytes() for file in state.glob("history.*"))
    for request_id, words in {
        "exit-2": f"status 3: cannot read '{prompt}', ids 1,120,",
        "open": f"last: status 3: cannot read '{prompt}', ids 1,120,",
        "client": "n is alpha0",
        "refused": "Unable to restore slot: ",
        "error": "Invalid input batch.",
        "died": "the decoder died under this request: ",
    }.items():
        assert words in live[request_id]
    data += b"".join(file.read_bytes() for file in state.glob("history.*"))
    for words in ("alpha0", "cannot read", "1,120,", "Unable", "Invalid input", "told_to_crash"):
        assert words.encode() not in data
    found = read_records(str(state / "history.db"), HandoffFilter())
    kept = {one["request_id"]: one["detail"] for one in found}
    assert re.fullmatch(r"crash 3 times in a row, not .*; tried again in .*", kept.pop("open"))
    assert kept == {
        **{f"exit-{number}": "status 3; its words are in the log" for number in range(3)},
        "client": "n is not 1",
        "refused": "the decoder refused it with status 400; its words are in the log",
        "error": "the decoder failed on the restored prompt; its words are in the log",
        "died": live["died"],
    }


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """Mount a file system of 400 KiB."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(directory)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_history_damaged_file_and_full_disk_are_told_and_no_request_notices(
    tmp_path: Path, provider: Path
) -> None:
    """The damaged file is kept, `onebitctl` may look at any time, what waits is written later."""
    state = tmp_path / "disk"
    with small_disk(state):
        (state / "history.db").write_bytes(b"no database" * 1000)
        with running(state, provider) as route:
            for number in range(8):
                chat(route, WORDS[number % 2], f"r{number}")
                found = in_file(state)
                assert found == [f"r{n}" for n in range(len(found))]
            wait_until(lambda: len(in_file(state)) == 8, "all are in the file")
            (record,) = route.daemon.log_records("history_damaged")
            assert record["level"] == "warning"
            (aside,) = state.glob("history.db.damaged-*")
            assert str(aside) in record["line"]
            assert aside.read_bytes() == b"no database" * 1000

            ballast = state / "ballast"
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                for size in (4096, 1):
                    while file.write(b"x" * size):
                        pass
            for number in range(8, 20):
                chat(route, WORDS[number % 2], f"r{number}")
            wait_until(lambda: route.daemon.log_records("history_not_written"), "the warning")
            everything = [f"r{number}" for number in range(20)]
            assert shown(route) == everything
            assert route.daemon.status()["state"] == "ready"
            ballast.unlink()
            wait_until(lambda: in_file(state) == everything, "all are in the file")
            warnings = [one["line"] for one in route.daemon.log_records("history_not_written")]
            assert len(set(warnings)) == len(warnings)
            assert "no room is left on its disk" in warnings[0]
