"""The provider of forty lines in onebit-provider(7) as the service's, with what its reader types.

Where the service may write is what is looked at; before a real decoder the provider is in
tests/e2e/test_example_provider_real.py.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from tests import provider_page as page
from tests.systemd.box import SUITES, Box
from tests.systemd.instances import STANDIN_DECODER, Instance, instance_in

pytestmark = pytest.mark.parametrize(
    "suite", SUITES[-1:], indirect=True, ids=lambda suite: suite.name
)


@pytest.fixture
def warm(installed: Box) -> Iterator[Instance]:
    """An instance with that provider, and the llama-server of the page's lines: the stand-in."""
    box = installed
    box.write(page.PROGRAM, page.provider(), 0o755)
    box.run("mkdir", "-p", "/opt/llama.cpp/bin", "/srv/models")
    box.run("ln", "-s", STANDIN_DECODER, page.LLAMA_SERVER)
    config: dict[str, Any] = tomllib.loads(page.configuration())
    mkdir, remove, server = page.commands()
    model = {"path": page.MODEL}
    try:
        with instance_in(box, "warm", 8300, start=False, model=model, **config) as instance:
            box.run("cp", "/srv/tiny.gguf", page.MODEL)
            box.run(*mkdir)
            box.run(*remove)
            with box.spawn(*server) as asked:
                try:
                    box.wait_until(f"test -S {page.HOME}/server.sock", "its socket")
                    instance.systemctl("start")
                    yield instance
                finally:
                    asked.kill()
                    asked.communicate()
    finally:
        box.run("rm", "-rf", page.HOME, page.PROGRAM, "/opt/llama.cpp", "/srv/models")


def test_example_as_the_services_provider_is_used(warm: Instance) -> None:
    """The sandbox lets it take the file away, and nothing of it stays."""
    assert warm.chat("The sun rises in the east")
    (record,) = warm.handoffs()
    assert record["outcome"] == "used", record
    assert warm.box.run("ls", f"{page.HOME}/slots").stdout == ""
