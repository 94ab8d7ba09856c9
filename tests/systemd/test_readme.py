"""What README says of installing and of the service, typed line by line on a fresh Debian.

The box has no network: what pip fetches is there already, see `conftest.install`.
"""

from __future__ import annotations

import shlex

import pytest

from tests import readme
from tests.llama_builds import BUILDS, CPU_ONLY, MODELS
from tests.systemd.box import SUITES, Box, Done
from tests.systemd.conftest import install
from tests.systemd.instances import BIN, REAL_DECODER, REAL_MODEL, Instance

EDITOR = """\
#!/bin/sh
# What a reader writes: README's own example, for the CPU.
set -e
test -f "$1"
cat /srv/example.toml >"$1"
"""
QUESTION = "What is the capital of France? Answer in one short sentence."


def example() -> str:
    """Return README's configuration, with what keeps llama-server and provider on the CPU."""
    text = readme.block("[model]").text
    lines = {
        "[backend]": f"[backend]\nargs = {[*CPU_ONLY, '-t', '1']}".replace("'", '"'),
        "[provider]": f'[provider]\nenv = {{ ONEBIT_PREFILL_LLAMA_ARGS = "{" ".join(CPU_ONLY)}" }}',
    }
    for section, more in lines.items():
        assert section in text
        text = text.replace(section, more)
    return text


def typed(box: Box, name: str) -> list[Done]:
    """Type the lines of a block, as root; each has to succeed."""
    return [box.run("sh", "-c", command, timeout_s=120) for command in readme.block(name).commands]


@pytest.mark.parametrize("suite", [SUITES[-1]], indirect=True, ids=lambda suite: suite.name)
def test_readme_service_serves_a_newcomer_who_types_what_stands_there(fresh_box: Box) -> None:
    """Environment, units, configuration, start, doctor, a drop-in, the man page."""
    BUILDS[0].require()
    MODELS[0].require()
    box = fresh_box
    # Where README's example has the model, the decoder and the wheels of this box are elsewhere.
    box.run("mkdir", "-p", "/srv/models", "/opt/llama.cpp/bin")
    box.run("ln", "-s", REAL_MODEL, "/srv/models/model.gguf")
    box.run("ln", "-s", REAL_DECODER, "/opt/llama.cpp/bin/llama-server")
    box.write("/srv/example.toml", example())
    box.write("/usr/local/bin/editor", EDITOR, 0o755)

    venv, pip = readme.block("/usr/bin/python3 -m venv").commands
    assert (venv.split()[-1], pip) == ("/opt/onebitd", f"{BIN}/pip install .")
    install(box)

    *_, status = typed(box, "/opt/onebitd/bin/onebitctl install-units")
    assert status.stdout.startswith("qwen: ready"), status
    qwen = Instance(box, "qwen", 8000)
    assert "Paris" in qwen.chat(QUESTION)
    assert [record["outcome"] for record in qwen.handoffs()] == ["used"]

    (report,) = typed(box, "onebitctl -i qwen doctor")
    assert "as the service sees it" in report.stdout.splitlines()[0], report
    assert "failed" not in report.stdout.splitlines()[1], report
    assert "ONEBITD(8)" in box.run("sh", "-c", "MANPAGER=cat man onebitd").stdout
    typed(box, "install -D -m 644 -t")
    assert qwen.show("MemoryDenyWriteExecute") == {"MemoryDenyWriteExecute": "no"}
    assert qwen.chat("Hello")
    assert box.run(*shlex.split("onebitctl -i qwen status")).stdout.startswith("qwen: ready")
