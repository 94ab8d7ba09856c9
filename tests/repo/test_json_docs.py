"""Every field that --json or the control socket gives is described in a man page."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onebitd.adapters.listener_probe import Answered
from onebitd.adapters.lock_probe import LockHolder, LockStatus
from onebitd.adapters.unit_states import UnitState
from onebitd.conformance import judge
from onebitd.conformance import page as kit_page
from onebitd.core.backend_state import BackendState
from onebitd.core.bench_plan import Run
from onebitd.core.bench_report import Failure, Judged, Pair, Report, Sample, Spread, Verdict, Way
from onebitd.core.breaker import FailureClass, State
from onebitd.core.control_api import (
    STATES,
    ProviderReset,
    ReloadAnswer,
    RequestInFlight,
    Status,
)
from onebitd.core.handoff_summary import _RATES, summarise
from onebitd.core.telemetry import DeviceSample
from onebitd.doctor.finding import Finding
from onebitd.surfaces import bench_pages, cli
from tests.core.state_files import Kv, Recr, build

MAN = Path(__file__).parents[2] / "man"
DAEMON = (MAN / "onebitd.8").read_text()
CLIENT = (MAN / "onebitctl.1").read_text()
LOOSE = {
    "provider.last_error": ("time", "reason", "detail"),
    "lock.holder": ("pid", "command"),
}
"""Objects of the status that have no class, with their fields."""
NAMED_BY_DATA = (
    "given",
    "missing",
    "break_even",
    "routes",
    "by_outcome",
    "by_reason",
    "outcomes",
    "parts",
)
"""Objects whose keys are no fields."""


def part(page: str, start: str, end: str) -> str:
    """Return what stands between two lines of a page, both patterns."""
    found = re.search(rf"^{start}\n(.*?)(?=^{end}|\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, start
    return found.group(1)


def words_of(command: str) -> set[str]:
    """Return the names that the page has in the description of a command of onebitctl."""
    text = part(CLIENT, rf"\.It Cm {command}(?: [^\n]*)?", r"\.It Cm |\.El\n\.Sh ")
    marked = re.findall(r"^\.(?:\w+ )*(?:Va|Li|Ql) (.*)$", text, re.MULTILINE)
    return set(re.findall(r"\w+", " ".join(marked)))


def leaves(kind: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of a class's fields, those of classes within it included."""
    hints = typing.get_type_hints(kind, localns={"DeviceSample": DeviceSample})
    for field in dataclasses.fields(kind):
        name, hint = f"{path}{field.name}", hints[field.name]
        inner = [one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)]
        if name in LOOSE:
            yield from (f"{name}.{one}" for one in LOOSE[name])
        elif inner:
            assert typing.get_origin(hint) in (None, list, types.UnionType), name
            brackets = "[]" if typing.get_origin(hint) is list else ""
            yield from leaves(inner[0], f"{name}{brackets}.")
        else:
            yield name


def keys_of(value: object) -> Iterator[str]:
    """Yield every key within a document, those aside that are no fields."""
    for one in value if isinstance(value, list | tuple) else ():
        yield from keys_of(one)
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield key
        of_data = key in NAMED_BY_DATA and isinstance(inner, dict)
        yield from keys_of(list(inner.values()) if of_data else inner)


def answer_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Return what a command prints with --json."""
    cli.main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_onebitd_page_status_fields_are_those_of_the_code() -> None:
    """Each field of /v1/status is described, those of every object in it, and no other."""
    listed = re.findall(r"^\.It Va (.*)$", part(DAEMON, r"\.Ss The status", r"\.Sh "), re.MULTILINE)
    found = [name for line in listed for name in line.split(" , ")]
    ours = [
        re.sub(r"^recent\.(used|failed|skipped)\.", "recent.HOW.", one) for one in leaves(Status)
    ]
    assert sorted(found) == sorted(set(ours))


def test_onebitd_page_status_words_are_those_of_the_code() -> None:
    """The words that states can have are all there."""
    text = part(DAEMON, r"\.Ss The status", r"\.Sh ")
    quoted = set(re.findall(r"^\.Ql (\w+)", text, re.MULTILINE))
    assert quoted >= {*STATES, *BackendState, *State}
    assert {*FailureClass} <= set(re.findall(r"^\.It Cm (\w+)", DAEMON, re.MULTILINE))


def test_onebitd_page_request_fields_are_those_of_the_code() -> None:
    """Those of `onebitctl requests --json`."""
    text = part(DAEMON, r"\.Sh REQUESTS", r"\.Sh ")
    words = set(re.findall(r"\w+", " ".join(re.findall(r"^\.Va (.*)$", text, re.MULTILINE))))
    assert {field.name for field in dataclasses.fields(RequestInFlight)} <= words


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("status", (*Answered._fields, *UnitState._fields, "probe", "error", "unit")),
        ("handoffs", (*keys_of(summarise([{"outcome": "used"}])), *_RATES, "p50", "p95", "lost")),
        ("cancel", ("cancelled",)),
        ("config", ("value", "source")),
        ("reload", tuple(leaves(ReloadAnswer))),
        ("lock", (*(one.name for one in dataclasses.fields(LockStatus)), *leaves(LockHolder))),
        ("try", ("reply", "record")),
        ("doctor", ("instance", "where", "checks", *leaves(Finding))),
        ("provider reset", tuple(leaves(ProviderReset))),
    ],
)
def test_onebitctl_page_json_fields_are_all_described(
    command: str, fields: tuple[str, ...]
) -> None:
    """A program is written by the page; a field that is not in it is there for nobody."""
    assert set(fields) - words_of(command) == set()


@pytest.mark.parametrize(
    "route", [["--restore-ms-per-mib", "1", "--kib-per-token", "9"], ["--adopt-ms", "1"]]
)
def test_onebitctl_page_advice_fields_are_all_described(
    capsys: pytest.CaptureFixture[str], route: list[str]
) -> None:
    """Of an answer by hand, in which the provider is too slow."""
    rates = ["--provider-ms-per-token", "9", "--decoder-ms-per-token", "1"]
    found = answer_of(capsys, "advise", *rates, *route)
    assert found["needed"]
    assert set(keys_of(found)) - words_of("advise") == set()


def test_onebitctl_page_split_fields_are_all_described(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a split with all figures."""
    rates = ["--gpu-ms-per-row", "0.1", "--npu-ms-per-tile", "156", "--gemm-share", "0.4"]
    found = answer_of(capsys, "advise", "--split", *rates)
    assert found["sequential"]
    assert set(keys_of(found)) - words_of("advise") == set()


def test_onebitctl_page_bench_fields_are_all_described() -> None:
    """Of a report with something of everything."""
    ways = tuple(Way(9, name, Spread(1, 1.0, 1.0, 1.0, 1.0, 1.0)) for name in ("decoder", "file"))
    report = Report(
        ways,
        (Judged("file", (Pair(9, 1.0, 1.0, Verdict.WINS),), (), None),),
        (Failure("file", "x", 1, (9,)),),
        0,
    )
    bench = bench_pages.Bench("m", "p", 99, (9,), ("decoder", "file"), 1, 1, "s")
    found = bench_pages.bench_object(bench, report, [Sample(Run(9, "file", 1), {}, 1.0, False)])
    assert set(keys_of(found)) - words_of("bench") == set()


def test_onebitctl_page_state_fields_are_all_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a file with an attention cache by rows, one by channels, and a recurrent state."""
    for name, trans in (("rows", 0), ("channels", 1)):
        (tmp_path / name).write_bytes(build([1, 2, 3], [Kv(v_trans=trans), Recr()]))
        path = str(tmp_path / name)
        shown = answer_of(capsys, "state", "show", "--ids", "--values", path)
        assert set(keys_of(shown)) - words_of("state show") == set()
    found = answer_of(capsys, "state", "check", path)
    assert set(keys_of(found)) - words_of("state check") == set()
    found = answer_of(capsys, "state", "diff", path, path)
    assert found["tensors"]
    assert set(keys_of(found)) - words_of("state diff") == set()


def test_onebitctl_page_conformance_fields_are_all_described() -> None:
    """Of the report, and every figure that a check may have."""
    found = set(keys_of(kit_page.as_json({}, [judge.Finding("", "", judge.Verdict.OK, "")])))
    for node in ast.walk(ast.parse(Path(judge.__file__).read_text())):
        if isinstance(node, ast.Dict):
            found |= {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
    assert len(found) > 30
    assert found - words_of("provider check") == set()
