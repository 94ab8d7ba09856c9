"""The page at /onebit/ on a running daemon: its door, its events, and a browser that looks."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onebitd.core.costs import Costs
from onebitd.core.handoff import Route as HandoffRoute
from onebitd.services.handoff import COSTS_FILE
from tests.e2e.chromium import Browser, running_chromium
from tests.e2e.standin_route import Background, Route, quick_provider, running_route
from tests.harness import raw_connection, wait_until

KEY = "sk-page-0123456789"
SLOW = {"provider": "sleep:0.3", "decoder": "--token-delay 0.05"}


ALIAS = "<img src=x onerror=document.title='model'>"
PROGRAM = "<b onclick=alert(1)>run<b>"


@pytest.fixture(name="shared", scope="module")
def fixture_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Route]:
    """Run one daemon for what does not end it: of odd names, and with costs that it has learned."""
    home = tmp_path_factory.mktemp("page")
    program = quick_provider(home)
    program = program.rename(program.with_name(PROGRAM))
    write_costs(home / COSTS_FILE)
    state = {"STATE_DIRECTORY": str(home)}
    with running_route("--alias", ALIAS, provider=program, env=state) as route:
        yield route


def write_costs(path: Path) -> None:
    """Write what a daemon would have learned where the decoder is slower by the token alone."""
    costs, now = Costs(), time.time()
    for tokens in (20, 80, 300, 700, 1500) * 2:
        costs.note_decoder(0, tokens, 5.0 + tokens, overlapped=False, now=now)
        for way, fixed_ms in ((HandoffRoute.FILE, 300.0), (HandoffRoute.SHARED, 150.0)):
            run_ms = fixed_ms + tokens / 10
            costs.note_provider(way, tokens, run_ms, overlapped=False, cold=False, now=now)
        costs.note_restore(tokens * 48, 1.0, now)
        costs.note_state(tokens, tokens * 48)
        costs.note_adopt(1.0)
        costs.note_lock(0.1)
    path.write_text(json.dumps({"subject": {}, "costs": costs.to_json()}))
    path.chmod(0o600)


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


def grouped(number: int) -> str:
    """Return a number as the page writes it."""
    return f"{number:,}".replace(",", "\u202f")


def test_page_in_a_browser_draws_where_a_handoff_pays(route: Route, browser: Browser) -> None:
    """Every curve is inside its picture; they cross where it says, which is where status says."""
    open_page(browser, route)

    def found() -> dict[str, Any] | None:
        policy = route.daemon.status()["policy"]
        drawn = browser.run(_EVEN)
        said = f"By state file a handoff beats the decoder from {grouped(policy['wins'][0][0])} "
        return {**policy, **drawn} if said in drawn["said"] else None

    even = wait_until(found, "the page says what status says")
    (start, end), *others = even["wins"]
    assert (others, even["route"], end) == ([], "file", even["last"])
    shared = re.search(r"By the shared route a handoff beats the decoder from (\d+) ", even["said"])
    assert shared
    starts = [start, int(shared[1])]
    assert 100 < starts[1] < starts[0] < 400
    assert {f"{grouped(one)} tokens" for one in starts} <= set(even["labels"])

    left, top, width, height = (float(word) for word in even["box"].split())
    curves = even["curves"]
    assert sorted(curves) == ["d", "f", "s"]
    for points in curves.values():
        assert None not in itertools.chain.from_iterable(points), "what is no number"
        xs, ys = zip(*points, strict=True)
        assert len(points) > 20
        assert list(xs) == sorted(set(xs))
        assert left < xs[0] < left + width / 4 < left + width * 3 / 4 < xs[-1] < left + width
        assert top < min(ys) < max(ys) < top + height
    for (x, y), way in zip(even["dots"], ("f", "s"), strict=True):
        assert height_at(curves["d"], x) == pytest.approx(y, abs=3)
        assert height_at(curves[way], x) == pytest.approx(y, abs=3)
        # Above is longer: the decoder's begins below the other and ends above it.
        assert curves["d"][0][1] > curves[way][0][1]
        assert curves["d"][-1][1] < curves[way][-1][1]
    assert even["legend"] == [
        "decoder alone",
        "handed over by state file",
        "handed over by the shared route",
    ]
    assert browser.console() == []


def height_at(points: list[tuple[float, float]], x: float) -> float:
    """Return where a curve is at this x."""
    for (x1, y1), (x2, y2) in itertools.pairwise(points):
        if x1 <= x <= x2:
            return y1 + (y2 - y1) * (x - x1) / (x2 - x1)
    raise AssertionError(f"{x} is not on the curve")


_EVEN = """
const svg = document.getElementById("even"), seen = svg.getBoundingClientRect().height > 0;
const all = (what) => seen ? [...svg.querySelectorAll(what)] : [];
const pairs = (text) => text.trim().split(/\\s+/).map((pair) => pair.split(",").map(Number));
return {
  said: document.getElementById("even-text").innerText,
  box: svg.getAttribute("viewBox"),
  curves: Object.fromEntries(
    all("polyline.curve").map((n) => [n.classList[1], pairs(n.getAttribute("points"))])),
  dots: all("circle.dot").map((n) => [+n.getAttribute("cx"), +n.getAttribute("cy")]),
  labels: all("text").map((n) => n.textContent),
  legend: [...document.querySelectorAll("#even-legend li")].map((n) => n.innerText),
};
"""


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


def test_page_in_a_browser_takes_no_name_for_markup(route: Route, browser: Browser) -> None:
    """Those of the model and the provider are somebody's own: they stand there as they are."""
    open_page(browser, route)
    assert route.daemon.status()["model"]["alias"] == ALIAS
    facts = browser.text("#facts").splitlines()
    assert {ALIAS, PROGRAM} <= set(facts)
    assert (
        browser.run("return document.querySelectorAll('img, b, [onerror], [onclick]').length") == 0
    )
    assert browser.run("return document.title") == "test \u2013 onebitd"
    assert browser.console() == []


def test_page_in_a_browser_shows_the_state_and_a_handoff_while_it_goes(
    route: Route, browser: Browser
) -> None:
    """As a row of spans, with the provider's run beside the reply before it; no word in the console
    means that nothing was refused by the policy of the page.
    """
    open_page(browser, route)
    assert browser.text("#state") == "ready"
    assert "Nothing is wrong" in browser.text("#said")
    before, used = rows(browser), route.daemon.status()["handoffs"]["used"]
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
    counted = str(used + 2)
    wait_until(lambda: browser.text("#outcomes td.num") == counted, "the outcomes are counted")
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
