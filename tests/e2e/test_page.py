"""The page at /onebit/ on a running daemon: its door, its events, and a browser that looks."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.chromium import Browser, running_chromium
from tests.e2e.standin_route import Background, Route, running_route
from tests.harness import raw_connection, wait_until

KEY = "sk-page-0123456789"
SLOW = {"provider": "sleep:0.3", "decoder": "--token-delay 0.05"}


@pytest.fixture(name="shared", scope="module")
def fixture_shared() -> Iterator[Route]:
    """Run one daemon for what does not end it."""
    with running_route() as route:
        yield route


@pytest.fixture(name="route")
def fixture_route(shared: Route) -> Route:
    """Return it as if nothing had been."""
    shared.begin()
    return shared


@pytest.fixture(name="chromium", scope="module")
def fixture_chromium() -> Iterator[Browser]:
    """Run one browser."""
    with running_chromium() as browser:
        yield browser


@pytest.fixture(name="browser")
def fixture_browser(chromium: Browser) -> Iterator[Browser]:
    """Return it on an empty page, with nothing in its console; what a page left running ends."""
    chromium.look(1280, 900, "light")
    chromium.console()
    yield chromium
    chromium.open("about:blank")


def page_of(route: Route) -> str:
    """Return the address of the page."""
    return f"http://127.0.0.1:{route.daemon.port}/onebit/"


def open_page(browser: Browser, route: Route) -> None:
    """Open the page, and wait until it has its data."""
    browser.open(page_of(route))
    browser.wait("return !document.getElementById('main').hidden", "the page has its data")


def rows(browser: Browser) -> int:
    """Return how many handoffs are in the table."""
    return int(browser.run("return document.querySelectorAll('#recent tr').length"))


@contextlib.contextmanager
def viewer(route: Route, key: str = "") -> Iterator[socket.socket]:
    """Yield a connection on which the events are asked for."""
    with raw_connection(route.daemon.port) as connection:
        head = f"Authorization: Bearer {key}\r\n" if key else ""
        request = f"GET /onebit/events HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n"
        connection.sendall(request.encode())
        yield connection


def viewers_of(route: Route) -> int:
    """Return how many streams of events the daemon serves."""
    found = route.daemon.control("/v1/requests")["requests"]
    return sum(one["path"] == "/onebit/events" and one["phase"] == "page" for one in found)


def read_to(connection: socket.socket, wanted: bytes) -> bytes:
    """Read until something has come, or the end."""
    data = b""
    while wanted not in data and (more := connection.recv(65536)):
        data += more
    assert wanted in data, data[-500:]
    return data


def reload_with(route: Route, old: str, new: str) -> Any:
    """Change the configuration file and have it taken over."""
    file = route.daemon.runtime.parent / "test.toml"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    return route.daemon.control("/v1/reload", "POST")


def test_page_is_ours_and_never_asks_the_decoder(route: Route) -> None:
    """What is below /onebit/ is answered by onebitd whatever it is; the guards are before it."""
    ask = route.daemon.request
    assert ask("GET", "/onebit/").headers["content-type"].startswith("text/html")
    assert ask("GET", "/onebit").headers["location"] == "onebit/"
    for path in ("/onebit/other", "/onebit/../v1/models", "/onebit/%2e%2e/v1/models"):
        assert ask("GET", path).status == 404
    assert ask("POST", "/onebit/").status == 405
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        for path in ("/onebit/", "/onebit/events"):
            assert ask("GET", path, None, headers).status == 403
    assert route.backend() == []


def test_events_tell_a_handoff_and_neither_its_prompt_nor_its_id(route: Route) -> None:
    """With its spans; and who has seen it is not told it again."""
    with viewer(route) as connection:
        read_to(connection, b"event: costs")
        route.behave(provider="exit:3")
        reply = route.daemon.chat(
            "a secret prompt", headers={"X-Request-Id": "a-secret-id"}, max_tokens=2
        )
        assert reply.headers["x-onebit-reason"] == "provider_exit"
        data = read_to(connection, b"event: handoff")
    assert b"secret" not in data
    block = next(part for part in data.decode().split("\n\n") if "event: handoff" in part)
    fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
    handoff = json.loads(fields["data"])
    assert (handoff["outcome"], handoff["reason"]) == ("fallback", "provider_exit")
    assert "provider" in [name for name, *_ in handoff["spans"]]
    assert not {"detail", "request_id", "provider"} & handoff.keys()
    headers = {"Last-Event-ID": fields["id"]}
    with raw_connection(route.daemon.port) as connection:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection.sendall(
            f"GET /onebit/events HTTP/1.1\r\nHost: 127.0.0.1\r\n{lines}\r\n".encode()
        )
        assert b"event: handoff" not in read_to(connection, b"event: costs")
    wait_until(lambda: viewers_of(route) == 0, "the viewers are gone")


def test_page_in_a_browser_shows_the_state_and_a_handoff_while_it_goes(
    route: Route, browser: Browser
) -> None:
    """As a row of spans, with the provider's run beside the reply before it; no word in the console
    means that nothing was refused by the policy of the page.
    """
    open_page(browser, route)
    assert browser.text("#state") == "ready"
    assert "Nothing is wrong" in browser.text("#said")
    before = rows(browser)
    route.behave(**SLOW)
    first = Background(route.daemon.chat, "the first one", stream=True, max_tokens=40)
    wait_until(lambda: route.daemon.status()["slot"]["phase"] == "decode", "the first decodes")
    second = Background(route.daemon.chat, "and the second", stream=True, max_tokens=4)
    browser.wait(
        "return [...document.querySelectorAll('#line .span.provider title')]"
        ".some((one) => one.textContent.includes('so far'))",
        "a run is drawn while it goes",
    )
    assert browser.text("#now").count("/v1/chat/completions") >= 1
    assert first.join().status == second.join().status == 200
    browser.wait(
        "return document.querySelectorAll('#recent tr').length === arguments[0]",
        "both are in the table",
        before + 2,
    )
    names = browser.run(
        "return [...document.querySelectorAll('#line .span')].map((one) => one.classList[1])"
    )
    assert {"provider", "handover", "decode"} <= set(names)
    assert "of it while the decoder worked" in browser.text("#line-text")
    assert "nothing of it" not in browser.text("#line-text")
    assert "used" in browser.text("#recent tr")
    wait_until(lambda: "2" in browser.text("#outcomes tr"), "the outcomes are counted")
    assert browser.console() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_page_fits_and_can_be_read(
    route: Route, browser: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    """From a telephone to a wide screen, in both colour schemes, with a contrast of AA."""
    if not route.daemon.handoffs():
        route.daemon.chat("something to show")
    open_page(browser, route)
    browser.wait("return document.querySelectorAll('#recent tr').length > 0", "a handoff")
    for actual in {width, 360, 1920} if width == 1280 else {width}:
        browser.look(actual, 900, scheme)
        assert browser.run("return document.documentElement.scrollWidth") <= actual
        assert browser.run(_CUT_OFF) == []
    browser.look(width, 900, scheme)
    picture = tmp_path / "page.png"
    browser.picture(picture)
    assert struct.unpack(">I", picture.read_bytes()[16:20]) == (width,)
    red = browser.run("return +getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert (red < 60) is (scheme == "dark")
    assert browser.run(_CONTRAST) == []
    assert browser.console() == []


_CUT_OFF = """
const boxes = [...document.querySelectorAll(".scroll")];
return boxes.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.id);
"""

_CONTRAST = """
const light = (text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
    .map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
};
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if (!/, 0\\)|transparent/.test(colour)) return colour;
  }
};
const poor = [];
for (const node of document.querySelectorAll("body *")) {
  const own = [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
  const unseen = ["SCRIPT", "NOSCRIPT", "title"].includes(node.tagName);
  if (!own || unseen || !node.getClientRects().length) continue;
  const style = getComputedStyle(node);
  const front = light(node.namespaceURI.includes("svg") ? style.fill : style.color);
  const back = light(behind(node));
  const ratio = (Math.max(front, back) + .05) / (Math.min(front, back) + .05);
  if (ratio < 4.5) poor.push(`${node.textContent}: ${ratio.toFixed(2)}`);
}
return poor;
"""


def test_page_in_a_browser_comes_back_by_itself_and_shows_nothing_twice(
    route: Route, browser: Browser
) -> None:
    """A reload ends its stream, and it goes on from the last handoff that it has."""
    route.daemon.chat("before")
    open_page(browser, route)
    browser.wait("return document.querySelectorAll('#recent tr').length > 0", "a handoff")
    before = rows(browser)
    route.daemon.control("/v1/reload", "POST")
    browser.wait("return !document.getElementById('banner').hidden", "it says that it is lost")
    route.daemon.chat("meanwhile")
    browser.wait("return document.getElementById('banner').hidden", "it is back")
    browser.wait(
        "return document.querySelectorAll('#recent tr').length === arguments[0]",
        "what came meanwhile is there, and nothing twice",
        before + 1,
    )


def test_page_with_keys_asks_for_one_and_ends_with_the_daemon(
    browser: Browser, tmp_path: Path
) -> None:
    """The file without data is for everybody, the data for who has a key. Turned off it is gone. A
    stop waits for no viewer, not even for one who reads nothing.
    """
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    with running_route(config=f'[http]\npage = true\napi_key_file = "{keys}"\n') as route:
        ask = route.daemon.request
        assert [ask(method, "/onebit/").status for method in ("GET", "HEAD")] == [200, 200]
        refused = [("GET", "/onebit/events"), ("POST", "/onebit/"), ("GET", "/onebit/x")]
        assert [ask(*one).status for one in refused] == [401, 401, 401]

        browser.open(page_of(route))
        browser.wait("return !document.getElementById('ask').hidden", "it asks for the key")
        assert browser.run("return document.getElementById('main').hidden")
        typed = (
            "document.getElementById('key').value = arguments[0];"
            "document.querySelector('#ask button').click()"
        )
        browser.run(typed, "sk-wrong")
        browser.wait(
            "return document.getElementById('state').textContent === 'wrong key'", "it says so"
        )
        browser.run(typed, KEY)
        browser.wait("return !document.getElementById('main').hidden", "the key opens it")

        with viewer(route, KEY) as connection:
            read_to(connection, b"event: costs")
            assert reload_with(route, "page = true", "page = false")["changed"] == ["http.page"]
            read_to(connection, b"0\r\n\r\n")
            assert ask("GET", "/onebit/").status == 404
            key = {"Authorization": f"Bearer {KEY}"}
            assert ask("GET", "/onebit/events", None, key).status == 404
            browser.wait(
                "return document.getElementById('banner-text').textContent.includes('http.page')",
                "the browser says why",
            )
        reload_with(route, "page = false", "page = true")
        browser.run("document.getElementById('again').click()")
        browser.wait("return document.getElementById('banner').hidden", "the browser is back")

        with viewer(route, KEY) as reading, viewer(route, KEY):
            read_to(reading, b"event: costs")
            wait_until(lambda: viewers_of(route) == 3, "all look")
            assert route.daemon.stop() == 0
            read_to(reading, b"0\r\n\r\n")
        browser.wait("return !document.getElementById('banner').hidden", "it is lost")
        assert browser.text("#state") == "not connected"
