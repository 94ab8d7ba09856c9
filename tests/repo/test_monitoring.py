"""Alert rules and dashboard, loaded and evaluated by promtool, and held against the metrics."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from onebitd.core.endings import possible_endings
from onebitd.core.handoff import HandoffRecord, Outcome, Reason, Route
from onebitd.core.metrics import METRICS, Kind
from onebitd.core.telemetry import DeviceSample
from onebitd.services.history import History
from onebitd.services.metrics import Metrics
from tests import readme
from tests.llama_builds import ROOT, require_program
from tests.repo.test_man_pages import DAEMON, items, section
from tests.surfaces.control_server import make_record, make_status

RULES = ROOT / "etc" / "prometheus-onebitd-rules.yml"
DASHBOARD: dict[str, Any] = json.loads((ROOT / "etc" / "grafana-onebitd.json").read_text())
EXAMPLE_LISTEN = "127.0.0.1:9464"
TARGET = 'job="onebitd",instance="box:9464"'
HOUR = 60
"""Minutes, which series here have a value for."""


def promtool(*args: str | Path) -> str:
    """Run promtool; return what it says, AssertionError with that unless it exits 0."""
    require_program("promtool")
    done = subprocess.run(
        ["promtool", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def samples() -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of all series of a daemon to which everything has happened."""
    told: dict[str, Any] = {"busy_percent": 87.0, "temperature_c": 61.5, "power_w": 54.0}
    card = DeviceSample(kind="gpu", name="card0", driver="amdgpu", **told)
    metrics = Metrics(lambda: make_status(devices=[card]), lambda: 3)
    whole: dict[str, Any] = {
        "handed_tokens": 300,
        "cached_tokens": 300,
        "evaluated_tokens": 64,
        "evaluated_ms": 900.0,
        "queue_ms": 20.0,
        "lock_ms": 1.0,
        "prefill_ms": 90.0,
        "restore_ms": 6.0,
        "share_ms": 0.4,
        "adopt_ms": 0.1,
        "first_byte_ms": 120.0,
        "total_ms": 900.0,
        "reply_tokens": 40,
        "decode_ms": 700.0,
        "state_bytes": 1 << 24,
    }
    for ending in possible_endings():
        metrics.count(make_record(**whole, **ending._asdict()))
    for family in text_string_to_metric_families(metrics.exposition(None)[1].decode()):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def series(name: str, labels: Mapping[str, str], values: str) -> dict[str, str]:
    """Return one input series of promtool's."""
    told = "".join(f',{key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{TARGET}{told}}}", "values": values}


def busy_hour() -> list[dict[str, str]]:
    """Return the series of that daemon over an hour in which its counters went on growing."""
    growing = ("_total", "_count", "_sum", "_bucket")
    return [
        series(name, labels, f"0+{value}x{HOUR}" if name.endswith(growing) else f"{value}x{HOUR}")
        for name, labels, value in samples()
    ]


def names_in(expression: str) -> set[str]:
    """Return the metrics that an expression is about."""
    bare = re.sub(r'"[^"]*"', "", expression)
    return set(re.findall(r"\b(?:onebitd|process)_\w+|\bup\b", bare))


# --- the dashboard ------------------------------------------------------------------------------


def panels() -> list[dict[str, Any]]:
    """Return the panels."""
    return list(DASHBOARD["panels"])


def expressions() -> dict[str, str]:
    """Return every query of the dashboard by panel and letter, as Prometheus gets it."""
    found = {}
    for panel in panels():
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
            assert "$" not in query, panel["title"]
            found[f"{panel['title']}, {target['refId']}"] = query
    return found


def test_dashboard_queries_give_numbers_on_a_busy_daemon(tmp_path: Path) -> None:
    """Every query is valid, and none has a name or a label that no series has."""
    queries = expressions()
    assert len(queries) > 20
    tests = [
        {
            "expr": f"count(({query}) >= 0) > bool 0",
            "eval_time": f"{HOUR}m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for query in queries.values()
    ]
    case = {"interval": "1m", "input_series": busy_hour(), "promql_expr_test": tests}
    file = tmp_path / "dashboard.test.yml"
    file.write_text(json.dumps({"tests": [case]}))
    promtool("test", "rules", file)


def test_dashboard_shows_every_metric() -> None:
    """A metric that no panel and no alert looks at is left to those who look for it: none is."""
    used = {
        name for query in [*expressions().values(), RULES.read_text()] for name in names_in(query)
    }
    bases = {re.sub(r"_(count|sum|bucket)$", "", name) for name in used} | used
    assert {metric.name for metric in METRICS} <= bases


def test_dashboard_and_rules_name_series_that_exist() -> None:
    """Each name is in a real exposition, to the letter."""
    exist = {name for name, _, _ in samples()} | {"up"}
    rules = "\n".join(
        re.findall(r"^ +expr: (.*?)(?=^ +(?:for|labels):)", RULES.read_text(), re.M | re.S)
    )
    for query in [*expressions().values(), rules]:
        assert names_in(query) <= exist
        assert names_in(query)


def test_dashboard_leaves_source_and_instance_to_its_user() -> None:
    """It works with any data source and any number of instances, and needs no plugin."""
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["instance"]["multi"]
    assert variables["instance"]["includeAll"]
    assert names_in(variables["instance"]["definition"]) == {"onebitd_build_info"}
    for panel in panels():
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {one["uid"] for one in sources} == {"${datasource}"}
        assert panel["type"] in {"stat", "timeseries", "state-timeline", "heatmap"}
        assert all('instance=~"$instance"' in target["expr"] for target in panel["targets"])
        assert panel["description"]


def test_dashboard_panels_do_not_overlap() -> None:
    """They fill a grid of 24 columns, each cell at most once."""
    cells = [
        (x, y)
        for panel in panels()
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels()}) == len(panels()) >= 12


# --- the rules ----------------------------------------------------------------------------------


def alerts() -> list[str]:
    """Return the alerts' names."""
    return re.findall(r"^ +- alert: (\w+)$", RULES.read_text(), re.MULTILINE)


def flat(name: str, value: float, **labels: str) -> dict[str, str]:
    """Return a gauge that stays the same for two hours and a half."""
    return series(name, labels, f"{value}x150")


def rising(name: str, per_minute: float, **labels: str) -> dict[str, str]:
    """Return a counter that grows for two hours and a half."""
    return series(name, labels, f"0+{per_minute}x150")


def handoffs(outcome: str, per_minute: float, reason: str = "none") -> dict[str, str]:
    """Return a counter of handoffs."""
    return rising(
        "onebitd_handoffs_total", per_minute, outcome=outcome, reason=reason, route="file"
    )


def speeds(provider_ms: float, decoder: float, restore_ms: float = 0) -> list[dict[str, str]]:
    """Return an hour of prompts of 1000 tokens, one a minute on each way.

    Args:
        provider_ms: for one on the provider.
        decoder: its tokens a second.
        restore_ms: of the one on the provider.
    """
    return [
        rising("onebitd_provider_prefill_seconds_sum", provider_ms / 1000),
        rising("onebitd_restore_seconds_sum", restore_ms / 1000),
        rising("onebitd_share_seconds_sum", 0),
        rising("onebitd_adopt_seconds_sum", 0),
        rising("onebitd_prompt_tokens_total", 1000, source="provider"),
        rising("onebitd_prefill_tokens_per_second_sum", decoder, source="decoder"),
        rising("onebitd_prefill_tokens_per_second_count", 1, source="decoder"),
    ]


def waits(fast: float, slow: float) -> list[dict[str, str]]:
    """Return a histogram: so many a minute waited a second at most, and up to two minutes."""
    name = "onebitd_queue_wait_seconds_bucket"
    return [
        rising(name, fast, le="1.0"),
        rising(name, fast, le="60.0"),
        rising(name, fast + slow, le="120.0"),
        rising(name, fast + slow, le="+Inf"),
    ]


Records = Sequence[HandoffRecord]


@dataclasses.dataclass(frozen=True)
class Moment:
    """What happens between two scrapes.

    Attributes:
        minute: of the second one.
        records: that end.
        provider: what has changed in its status by then.
        is_new: the daemon was restarted before that.
    """

    minute: int
    records: Records = ()
    provider: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_new: bool = False


def lived(*moments: Moment, still: bool = False) -> list[dict[str, str]]:
    """Return what a daemon tells the rules in two hours and a half, scraped once a minute.

    It is scraped before anything has happened; what it does not tell from the start is missing.

    Args:
        moments: in their order.
        still: with the counters that never move, which promtool would take its time for.
    """
    about = names_in(RULES.read_text())
    told: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    now = [make_status()]
    for number, moment in enumerate((Moment(0, is_new=True), *moments)):
        if moment.is_new:
            history, metrics = History(), Metrics(lambda: now[0], lambda: 0)
            history.listen(metrics.count)
        for record in moment.records:
            history.add(record)
        provider = dataclasses.replace(
            now[0].provider,
            consecutive_failures=history.consecutive_failures,
            **moment.provider,
        )
        now[0] = make_status(provider=provider, history=history)
        until = (*moments, Moment(151))[number].minute
        for family in text_string_to_metric_families(metrics.exposition(None)[1].decode()):
            for sample in family.samples if family.name.startswith("onebitd_") else ():
                if sample.name in about:
                    key = sample.name, tuple(sample.labels.items())
                    before = [f"_x{moment.minute}"] if moment.minute else []
                    told.setdefault(key, before).append(
                        f"{sample.value}x{until - moment.minute - 1}"
                    )
    return [
        series(name, dict(labels), " ".join(values))
        for (name, labels), values in told.items()
        if still or not all(value.startswith("0.0x") for value in values)
    ]


def times(number: int, outcome: Outcome, reason: Reason | None = None, **more: Any) -> Records:
    """Return so many requests that ended the same way, by file unless it is said."""
    route = more.pop("route", Route.FILE)
    return [make_record(0, outcome, reason=reason, route=route, **more) for _ in range(number)]


def failures(number: int, reason: Reason = Reason.PROVIDER_EXIT, **more: Any) -> Records:
    """Return so many handoffs after which the decoder prefilled."""
    return times(number, Outcome.FALLBACK, reason, **more)


def refusals(number: int, reason: Reason) -> Records:
    """Return so many requests that got an error, and for which nothing was tried."""
    return times(number, Outcome.FAILED, reason, route=None)


OPEN = {"breaker": "open"}
OFF = {"route_off": "the decoder evaluated the prompt again after each of 3 handoffs"}


def in_turn(closed: int, others: int) -> list[dict[str, str]]:
    """Return a breaker that is closed for some minutes and not for others, all the time."""
    values = " ".join(f"1x{closed - 1} 0x{others - 1}" for _ in range(150 // (closed + others)))
    return [series("onebitd_provider_breaker_state", {"state": "closed"}, values)]


def state(word: str) -> list[dict[str, str]]:
    """Return the daemon's state."""
    words = ("loading", "ready", "degraded", "restarting", "draining", "failed")
    return [flat("onebitd_state", int(word == one), state=one) for one in words]


def queue(pending: int) -> list[dict[str, str]]:
    """Return a line of ten places."""
    return [flat("onebitd_queue_requests", pending), flat("onebitd_queue_max_requests", 10)]


@dataclasses.dataclass(frozen=True)
class Case:
    """Series on which an alert fires, and others on which it must not.

    Attributes:
        also: others on which it fires.
    """

    alert: str
    fires: Iterable[dict[str, str]]
    quiet: Iterable[Iterable[dict[str, str]]]
    also: Sequence[Iterable[dict[str, str]]] = ()


def breaker(word: str) -> list[dict[str, str]]:
    """Return the breaker's state."""
    name = "onebitd_provider_breaker_state"
    return [flat(name, int(word == one), state=one) for one in ("closed", "open", "half_open")]


CASES = (
    Case("OnebitdDown", [flat("up", 0)], [[flat("up", 1)]]),
    Case("OnebitdNotReady", state("restarting"), [state("ready"), state("degraded")]),
    Case(
        "OnebitdDecoderRestarting",
        [rising("onebitd_decoder_restarts_total", 0.1)],
        [
            [flat("onebitd_decoder_restarts_total", 7)],
            [series("onebitd_decoder_restarts_total", {}, "0x140 1x10")],
            # Prometheus extrapolates an increase of one to more than one.
            [series("onebitd_decoder_restarts_total", {}, "7x130 8x20")],
        ],
        also=[[series("onebitd_decoder_restarts_total", {}, "7x130 9x20")]],
    ),
    Case(
        "OnebitdRestarting",
        [series("process_start_time_seconds", {}, "1000x125 8600x5 9000x5 9300x15")],
        [[series("process_start_time_seconds", {}, "1000x125 8600x5 9000x20")]],
    ),
    Case(
        "OnebitdBreakerOpen",
        breaker("open"),
        [
            breaker("closed"),
            [series("onebitd_provider_breaker_state", {"state": "closed"}, "1x140 0x9")],
            in_turn(closed=8, others=2),
        ],
        also=[lived(Moment(130, failures(3), OPEN)), in_turn(closed=1, others=4)],
    ),
    Case(
        "OnebitdProviderStuck",
        [flat("onebitd_provider_state", 1, state="stuck")],
        [[flat("onebitd_provider_state", 0, state="stuck")]],
    ),
    Case(
        "OnebitdHandoffsFailing",
        [handoffs("used", 1), handoffs("fallback", 0.5, "provider_exit")],
        [
            [handoffs("used", 10), handoffs("fallback", 1, "lock_busy")],
            [handoffs("fallback", 0.05, "provider_exit")],
            [handoffs("skipped", 5, "policy"), handoffs("cancelled", 5, "client_gone")],
            lived(Moment(140, failures(2))),
            lived(Moment(10, failures(1)), Moment(140, failures(2))),
            lived(Moment(140, [*times(20, Outcome.USED), *failures(3)])),
            lived(Moment(140, refusals(5, Reason.QUEUE_FULL))),
            lived(Moment(140, refusals(5, Reason.TOO_SHORT))),
        ],
        also=[
            # All that the breaker lets through, within one scrape.
            lived(Moment(140, failures(3), OPEN)),
            lived(Moment(140, failures(3, route=Route.SHARED), OPEN)),
            lived(Moment(10, times(40, Outcome.USED)), Moment(140, failures(3), OPEN)),
            lived(Moment(139, failures(1)), Moment(140, failures(2, Reason.LOCK_BUSY), OPEN)),
            lived(Moment(140, times(3, Outcome.FAILED, Reason.PROVIDER_EXIT), OPEN)),
        ],
    ),
    Case(
        "OnebitdHandoffsInVain",
        lived(*(Moment(minute, failures(1)) for minute in (10, 55, 100))),
        [
            lived(Moment(10, failures(2)), Moment(20, times(1, Outcome.USED), {})),
            lived(Moment(10, times(3, Outcome.WASTED), OFF)),
            lived(Moment(140, refusals(5, Reason.TOO_SHORT))),
            lived(Moment(10, failures(3)), Moment(20, is_new=True)),
        ],
        # Its counter has an increase of one: the daemon before it had come to two.
        also=[lived(Moment(10, failures(2)), Moment(140, failures(3), OPEN, is_new=True))],
    ),
    Case(
        "OnebitdHandoffsWasted",
        [handoffs("wasted", 0.1)],
        [
            [handoffs("used", 5), handoffs("wasted", 0.02)],
            lived(Moment(10, times(1, Outcome.WASTED)), Moment(140, times(2, Outcome.WASTED))),
        ],
        also=[
            lived(Moment(140, times(3, Outcome.WASTED), OFF)),
            lived(Moment(100, times(2, Outcome.WASTED)), Moment(140, times(1, Outcome.WASTED))),
            lived(
                *(Moment(minute, times(1, Outcome.WASTED)) for minute in (5, 6)),
                Moment(70, times(1, Outcome.WASTED), OFF),
            ),
        ],
    ),
    Case("OnebitdQueueFull", queue(9), [queue(2)]),
    Case("OnebitdLongWaits", waits(1, 1), [waits(100, 1), waits(0, 0)]),
    Case(
        "OnebitdDriftFound",
        [flat("onebitd_audit_strikes", 1)],
        [[flat("onebitd_audit_strikes", 0)]],
    ),
    Case(
        "OnebitdHandoffSlower",
        speeds(4000, 500, restore_ms=500),
        [speeds(300, 500, restore_ms=50), speeds(2100, 500)],
    ),
    Case("OnebitdDegraded", state("degraded"), [state("ready")]),
)


def test_rules_are_valid() -> None:
    """Expressions and templates parse, and each alert has a case below."""
    assert f"SUCCESS: {len(alerts())} rules found" in promtool("check", "rules", RULES)
    assert [case.alert for case in CASES] == alerts()


def test_rules_fire_when_they_should_and_not_else(tmp_path: Path) -> None:
    """Each alert, after two hours and a half of what it is for, and of what it is not for."""
    given, tests = [], []
    for case in CASES:
        fires = [case.fires, *case.also]
        for number, some in enumerate((*fires, *case.quiet)):
            # An instance for each: promtool needs most of a second for a run.
            own = f'instance="{case.alert}-{number}"'
            given += [
                one | {"series": one["series"].replace('instance="box:9464"', own)} for one in some
            ]
        about = f'alertname="{case.alert}",alertstate="firing",instance=~"{case.alert}-.*"'
        expected = [
            {"labels": f'{{instance="{case.alert}-{number}"}}', "value": 1}
            for number in range(len(fires))
        ]
        tests.append(
            {
                "expr": f"count by (instance) (ALERTS{{{about}}})",
                "eval_time": "149m",
                "exp_samples": expected,
            }
        )
    run = {"interval": "1m", "input_series": given, "promql_expr_test": tests}
    file = tmp_path / "rules.test.yml"
    file.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [run]})
    )
    promtool("test", "rules", file)


def test_rules_are_quiet_on_a_daemon_with_nothing_wrong(tmp_path: Path) -> None:
    """None fires on the series that a new daemon has, before anything has happened."""
    case = {
        "interval": "1m",
        "input_series": [*lived(still=True), flat("up", 1)],
        "promql_expr_test": [{"expr": "ALERTS", "eval_time": "149m", "exp_samples": []}],
    }
    file = tmp_path / "quiet.test.yml"
    file.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]})
    )
    promtool("test", "rules", file)


def test_rules_say_what_it_is_and_what_to_do() -> None:
    """Severity, summary with the instance, and a description for each."""
    blocks = re.split(r"^ +- alert: ", RULES.read_text(), flags=re.MULTILINE)[1:]
    for block in blocks:
        assert re.search(r"^ +severity: (critical|warning|info)$", block, re.MULTILINE)
        summary = re.search(r'^ +summary: "(.+)"$', block, re.MULTILINE)
        assert summary
        assert "$labels.instance" in summary[1]
        description = re.search(r'^ +description: "(.+)"$', block, re.MULTILINE)
        assert description
        assert re.search(r"`|update|Reload|Shorter", description[1])


def test_readme_configuration_of_prometheus_is_valid(tmp_path: Path) -> None:
    """It loads, with the rules; its job is the one that an alert asks for."""
    text = readme.block("scrape_configs:").text
    installed = re.findall(r"\S+/prometheus-onebitd-rules\.yml", text)
    assert installed == ["/usr/local/share/onebitd/prometheus-onebitd-rules.yml"]
    file = tmp_path / "prometheus.yml"
    file.write_text(text.replace(installed[0], str(RULES)))
    assert f"{len(alerts())} rules found" in promtool("check", "config", file)
    (job,) = re.findall(r"job_name: (\w+)", text)
    assert f'up{{job="{job}"}}' in RULES.read_text()
    assert re.findall(r'targets: \["(.+)"\]', text) == [EXAMPLE_LISTEN]
    assert f'#listen = "{EXAMPLE_LISTEN}"' in (ROOT / "etc" / "onebitd.toml").read_text()


# --- the manual ---------------------------------------------------------------------------------


def test_onebitd_page_metrics_are_those_of_the_code() -> None:
    """Each metric is there with its type and its labels, in the order of the code."""
    text = section(DAEMON, "METRICS")
    assert items(text, "Va") == [metric.name for metric in METRICS]
    for metric in METRICS:
        entry = text.partition(f"\n.It Va {metric.name}\n")[2].partition("\n.It ")[0]
        head, _, rest = entry.partition("\n")
        assert head == metric.kind.capitalize() + (", by" if metric.labels else "."), metric.name
        labels = [] if not metric.labels else re.findall(r"^\.Va (\w+)", rest, re.MULTILINE)
        assert labels[: len(metric.labels)] == list(metric.labels), metric.name


def test_onebitd_page_process_metrics_are_those_of_the_exposition() -> None:
    """What every exporter has is named, too."""
    found = {name for name, _, _ in samples() if name.startswith("process_")}
    assert set(re.findall(r"^\.Va (process_\w+)", section(DAEMON, "METRICS"), re.M)) == found


def test_onebitd_page_label_values_of_states_are_those_of_the_code() -> None:
    """A reader who writes an alert of his own finds every word."""
    text = section(DAEMON, "METRICS")
    for metric in METRICS:
        if metric.kind is Kind.GAUGE and metric.name != "onebitd_state":
            for words in metric.labels.values():
                assert all(f".Ql {word}" in text for word in words), metric.name
