"""What README says of installing and of the service, typed line by line on a fresh Debian.

The box has no network: what pip fetches is there already. Its lines that install are typed where
the first box of a suite gets onebitd, in `conftest.install_by_commands`.
"""

from __future__ import annotations

import contextlib
import shlex
import signal

import pytest

from tests import readme
from tests.llama_builds import BUILDS, CPU_ONLY, MODELS
from tests.systemd.box import SUITES, Box, Done
from tests.systemd.conftest import install
from tests.systemd.instances import REAL_DECODER, REAL_MODEL, Instance

EDITOR = """\
#!/bin/sh
# What a reader writes: README's own example, for the CPU.
set -e
test -f "$1"
cat /srv/example.toml >"$1"
"""
LLAMA_SERVER = f"""\
#!/bin/sh
exec {REAL_DECODER} "$@" {shlex.join(CPU_ONLY)} -t 1
"""
QUESTION = "What is the capital of France? Answer in one short sentence."


def typed(box: Box, block: readme.Block) -> list[Done]:
    """Type the lines of a block, as root; each has to succeed."""
    return [box.run("sh", "-c", command, timeout_s=120) for command in block.commands]


@pytest.mark.parametrize("suite", [SUITES[-1]], indirect=True, ids=lambda suite: suite.name)
def test_readme_service_serves_a_newcomer_who_types_what_stands_there(fresh_box: Box) -> None:
    """Environment, a run by hand, units, configuration, start, doctor, metrics, a drop-in."""
    BUILDS[0].require()
    MODELS[0].require()
    box = fresh_box
    # What README's reader has: model and llama-server, which in this box are elsewhere.
    box.run("mkdir", "-p", "/srv/models")
    box.run("ln", "-s", REAL_MODEL, "/srv/models/model.gguf")
    box.write("/opt/llama.cpp/bin/llama-server", LLAMA_SERVER, 0o755)
    box.write("/srv/example.toml", readme.block("[model]").text)
    box.write("/usr/local/bin/editor", EDITOR, 0o755)

    install(box)
    serves_by_hand(box)

    *_, status = typed(box, readme.block("/opt/onebitd/bin/onebitctl install-units"))
    assert status.stdout.startswith("qwen: ready"), status
    qwen = Instance(box, "qwen", 8000)
    assert "Paris" in qwen.chat(QUESTION)
    assert [record["outcome"] for record in qwen.handoffs()] == ["used"]

    (report,) = typed(box, readme.block("onebitctl -i qwen doctor"))
    assert "as the service sees it" in report.stdout.splitlines()[0], report
    assert "failed" not in report.stdout.splitlines()[1], report
    assert "ONEBITD(8)" in box.run("sh", "-c", "MANPAGER=cat man onebitd").stdout
    (metrics,) = typed(box, readme.block("curl --unix-socket"))
    assert 'onebitd_state{state="ready"} 1.0' in metrics.stdout.splitlines(), metrics
    typed(box, readme.block("install -D -m 644 -t"))
    assert qwen.show("MemoryDenyWriteExecute") == {"MemoryDenyWriteExecute": "no"}
    assert qwen.chat("Hello")
    assert box.run(*shlex.split("onebitctl -i qwen status")).stdout.startswith("qwen: ready")


def serves_by_hand(box: Box) -> None:
    """See README's way without a service work, for a user who is nobody in particular."""
    (line,) = readme.block("/opt/onebitd/bin/onebitd -m").commands
    box.run("useradd", "--create-home", "alice")
    with (
        box.spawn("sh", "-c", f"cd /srv/models; exec {line}", user="alice") as daemon,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(daemon.send_signal, signal.SIGKILL)
        own = Instance(box, "any", 8000)
        box.wait_until(lambda: own.request("/health")[0] == 200, "the daemon serves")
        assert "Paris" in own.chat(QUESTION, headers=("X-Onebit-Handoff: strict",))
        daemon.send_signal(signal.SIGINT)
        _, said = daemon.communicate(timeout=60)
    assert own.request("/health")[0] == 0, said
