"""The listener for scrapers, on a connection of its own."""

from __future__ import annotations

import pytest

from onebitd.core.config_resolve import resolve
from onebitd.surfaces.metrics_http import MetricsApp
from tests.adapters.http_rig import serving

pytestmark = pytest.mark.trio

CONFIG = resolve(instance="test", file={"model": {"path": "/m.gguf"}})
HEAD = b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "framing",
    [
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
        b"Host: localhost\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_listener_ends_the_connection_of_a_head_with_two_readings(framing: bytes) -> None:
    """What follows is not taken for a request; one that is merely refused keeps its connection."""
    app = MetricsApp(lambda accept: ("text/plain", b"numbers"), lambda: CONFIG)
    async with serving(app) as served:
        talk = await served.connect(HEAD + framing + b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        status, headers, _ = await talk.reply()
        assert (status, headers.get("connection")) == (400, "close")
        assert b"numbers" not in await talk.rest()
        talk = await served.connect(HEAD + b"Content-Length: 0\r\n\r\n")
        assert (await talk.reply())[0] == 405
        await talk.stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await talk.reply())[2] == b"numbers"
