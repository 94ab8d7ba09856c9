"""The metrics of a real daemon on the stand-ins, read as Prometheus reads them."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from onebitd.core.endings import possible_endings
from onebitd.core.handoff import Outcome
from onebitd.core.metrics import label
from tests.e2e.standin_route import Route, quick_provider, run_onebitd, running_route
from tests.harness import wait_until
from tests.llama_builds import UnixConnection, require_program

HANDOFFS = "onebitd_handoffs_total"
FAILED_RUNS = f'{HANDOFFS}{{outcome="fallback",reason="provider_exit",route="file"}}'
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
LONG = [" ".join(f"{name}{number}" for number in range(20)) for name in ("alpha", "beta", "gamma")]
CONFIG = """
[metrics]
listen = "127.0.0.1:0"
[http]
page = true
allowed_hosts = ["scraper.lan"]
"""


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Route, str]]:
    """A daemon with a listener for scrapers, and what that said before anything was asked."""
    provider = quick_provider(tmp_path_factory.mktemp("provider"))
    with running_route(config=CONFIG, provider=provider) as found:
        yield found, ask(found)[2]


@pytest.fixture(scope="module")
def route(untouched: tuple[Route, str]) -> Route:
    """The daemon after two handoffs, a fallback and a skip."""
    found, _ = untouched
    daemon = found.daemon
    assert daemon.chat(LONG[0]).status == 200
    assert daemon.chat("secret words", stream=True).status == 200
    found.behave(provider="exit:3")
    assert daemon.chat(LONG[1]).status == 200
    assert daemon.chat(LONG[2], headers={"X-Onebit-Handoff": "never"}).status == 200
    daemon.last_handoff(4)
    return found


def address(route: Route) -> str:
    """Return where the listener for scrapers is, by the log."""
    (record,) = route.daemon.log_records("metrics")
    found = re.fullmatch(r"metrics are on http://(127\.0\.0\.1:\d+)/metrics", record["line"])
    assert found
    return found[1]


def ask(
    route: Route, path: str = "/metrics", method: str = "GET", **headers: str
) -> tuple[int, str, str]:
    """Ask the listener for scrapers; return status, content type and body."""
    connection = http.client.HTTPConnection(address(route), timeout=30)
    try:
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.headers["Content-Type"], reply.read().decode()
    finally:
        connection.close()


def by_socket(route: Route, accept: str) -> tuple[str, str]:
    """Scrape the control socket; return content type and body."""
    connection = UnixConnection(route.daemon.runtime / "control.sock", 30.0)
    try:
        connection.request("GET", "/metrics", headers={"Accept": accept})
        reply = connection.getresponse()
        assert reply.status == 200
        return reply.headers["Content-Type"], reply.read().decode()
    finally:
        connection.close()


def numbers(text: str) -> dict[str, float]:
    """Return value by series, as it is written."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {series: float(value) for series, _, value in lines}


def test_metrics_are_all_there_at_zero_before_the_first_handoff(
    untouched: tuple[Route, str],
) -> None:
    """Prometheus sees no increase in what a series begins with: a burst of failures was lost."""
    found = numbers(untouched[1])
    counts = {name: value for name, value in found.items() if HANDOFFS in name}
    assert set(counts) == {
        f'{HANDOFFS}{{outcome="{label(outcome)}",reason="{label(reason)}",route="{label(route)}"}}'
        for outcome, reason, route in possible_endings()
    }
    for outcome in Outcome:
        for name in ("first_byte", "request"):
            counts[name + outcome] = found[f'onebitd_{name}_seconds_count{{outcome="{outcome}"}}']
    assert set(counts.values()) == {0}


def test_metrics_pass_promtools_check(route: Route) -> None:
    """Names, types, units and help are as Prometheus wants them."""
    require_program("promtool")
    _, _, text = ask(route)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_metrics_count_what_happened(route: Route) -> None:
    """Outcomes, tokens by source, and each part of the first byte."""
    found = numbers(ask(route)[2])
    assert found[f'{HANDOFFS}{{outcome="used",reason="none",route="file"}}'] == 2
    assert found[FAILED_RUNS] == 1
    assert found[f'{HANDOFFS}{{outcome="skipped",reason="policy",route="none"}}'] == 1
    records = route.daemon.handoffs()
    for source, field in (("provider", "handed_tokens"), ("decoder", "evaluated_tokens")):
        wanted = sum(record.get(field, 0) for record in records)
        assert found[f'onebitd_prompt_tokens_total{{source="{source}"}}'] == wanted > 0
    assert found["onebitd_reply_tokens_total"] == sum(one["reply_tokens"] for one in records)
    assert found["onebitd_restore_seconds_count"] == found["onebitd_state_bytes_count"] == 2
    assert found['onebitd_first_byte_seconds_count{outcome="used"}'] == 2
    assert found['onebitd_request_seconds_count{outcome="fallback"}'] == 1
    assert found['onebitd_prefill_tokens_per_second_count{source="decoder"}'] == 2
    assert found["onebitd_decode_tokens_per_second_count"] == 4
    assert found['onebitd_state{state="ready"}'] == 1
    assert found['onebitd_provider_breaker_state{state="closed"}'] == 1
    assert found["onebitd_decoder_resident_memory_bytes"] > 0
    assert found["process_resident_memory_bytes"] > 0
    told = wait_until(lambda: route.daemon.status()["backend"]["build"], "the build")
    assert any(f'llama_cpp="{told}"' in series for series in found)


def test_metrics_are_the_same_on_the_socket_and_over_tcp(route: Route) -> None:
    """In both formats; OpenMetrics stands the strict reader."""
    for accept, kind in (("", "text/plain; version=0.0.4"), (OPENMETRICS, OPENMETRICS)):
        status, content_type, text = ask(route, Accept=accept)
        assert (status, content_type) == (200, f"{kind}; charset=utf-8")
        assert by_socket(route, accept)[0] == content_type
        ours = [
            {name: value for name, value in numbers(one).items() if "handoffs" in name}
            for one in (text, by_socket(route, accept)[1])
        ]
        assert ours[0] == ours[1] != {}
    read: Any = text_string_to_metric_families  # it has no types
    families = list(read(text))
    assert {"onebitd_handoffs", "onebitd_build"} <= {family.name for family in families}


def test_metrics_open_status_page_is_no_request_in_flight(route: Route) -> None:
    """A display on the wall does not make an idle box look busy."""
    viewer = http.client.HTTPConnection("127.0.0.1", route.daemon.port, timeout=30)
    try:
        viewer.request("GET", "/onebit/events")
        assert viewer.getresponse().readline() != b""
        (served,) = route.daemon.control("/v1/requests")["requests"]
        assert served["path"] == "/onebit/events"
        assert numbers(by_socket(route, "")[1])["onebitd_requests_in_flight"] == 0
    finally:
        viewer.close()


def test_metrics_hold_nothing_private(route: Route) -> None:
    """No word of a prompt, no path, no id: the listener asks nobody for a key."""
    text = ask(route)[2]
    ids = [record["request_id"] for record in route.daemon.handoffs()]
    assert len(ids) == 4
    assert not [word for word in ("secret", "alpha1", "/", "tiny", *ids) if word in text]


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/metrics", "HEAD", {}, 200),
        ("/metrics?x=1", "GET", {}, 200),
        ("/metrics", "GET", {"Host": "scraper.lan:9464"}, 200),
        ("/metrics", "GET", {"Host": "localhost"}, 200),
        ("/metrics", "GET", {"Host": "evil.example"}, 403),
        ("/metrics", "GET", {"Origin": "http://localhost"}, 403),
        ("/metrics", "GET", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ("/metrics", "POST", {}, 405),
        ("/metrics/", "GET", {}, 404),
        ("/v1/status", "GET", {}, 404),
        ("/v1/reload", "POST", {}, 404),
        ("/health", "GET", {}, 404),
    ],
)
def test_listener_serves_metrics_and_nothing_else(
    route: Route, path: str, method: str, headers: dict[str, str], status: int
) -> None:
    """Nothing of the control socket, nothing of the API, and no web page."""
    found, content_type, body = ask(route, path, method, **headers)
    assert found == status
    if status == 200:
        assert content_type.startswith("text/plain")
        assert ("onebitd_state" in body) is (method == "GET")
    else:
        assert json.loads(body)["error"]["code"] == status


def test_listener_that_is_taken_is_told_with_its_key(route: Route, tmp_path: Path) -> None:
    """A second daemon ends at once with status 3, as for its port, and one line."""
    where = address(route)
    file = tmp_path / "two.toml"
    file.write_text(
        f'[model]\npath = "{route.home / "tiny.gguf"}"\n[metrics]\nlisten = "{where}"\n'
        f'[lock]\npath = "{tmp_path / "lock"}"\n'
    )
    server = route.home / "absent-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    done = run_onebitd(
        *("--config", str(file), "--port", "0", "--llama-server", str(server)),
        runtime=tmp_path / "rt",
    )
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    port = where.partition(":")[2]
    assert line.startswith(f"onebitd: port {port} on 127.0.0.1 is taken")
    assert line.endswith("choose another port with metrics.listen")
    assert not (tmp_path / "rt" / "onebitd" / "two" / "control.sock").exists()


def test_reload_of_another_address_says_that_it_needs_a_restart(route: Route) -> None:
    """And the listener stays where it is."""
    file = route.daemon.runtime.parent / "test.toml"
    before = file.read_text()
    try:
        file.write_text(before.replace('"127.0.0.1:0"', '"127.0.0.1:1"'))
        answer = route.daemon.control("/v1/reload", "POST")
    finally:
        file.write_text(before)
    assert answer["needs_restart"] == ["metrics.listen"]
    assert ask(route)[0] == 200


def test_metrics_of_three_failures_between_two_scrapes_differ_by_three(route: Route) -> None:
    """That is all the breaker lets through, and what the alerts have to go by."""
    route.begin()
    before = numbers(ask(route)[2])
    route.behave(provider="exit:3")
    for number in range(4):
        words = " ".join(f"delta{number}x{word}" for word in range(20))
        assert route.daemon.chat(words, headers={"X-Onebit-Handoff": "always"}).status == 200
    refused = f'{HANDOFFS}{{outcome="skipped",reason="breaker_open",route="none"}}'

    def moved() -> dict[str, float]:
        now = numbers(ask(route)[2])
        return {
            name: now[name] - before[name]
            for name in now
            if HANDOFFS in name and now[name] != before[name]
        }

    # What the listener says may be a moment old.
    wait_until(lambda: moved() == {FAILED_RUNS: 3, refused: 1}, "three failures and a skip")
    now = numbers(ask(route)[2])
    assert now['onebitd_provider_breaker_state{state="closed"}'] == 0
    assert now["onebitd_provider_consecutive_failures"] >= 3
    assert now["onebitd_provider_route_off"] == 0
