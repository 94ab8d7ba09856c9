"""What the checks inside a service are asked, and what they answer. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from onebitd.doctor import place
from onebitd.doctor.finding import BadReport, Finding, from_json
from onebitd.doctor.place import Place


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What is to be checked.

    Attributes:
        place: for the commands in the findings.
        argv: the daemon's command line, without the program.
        environ: variables that the daemon has and these checks do not.
        socket: the daemon's control socket; None: to be looked for.
        quick: load no model, and run no provider.
        runs: the daemon may run. Who asks one that does not would have systemd start it, where a
            socket unit listens for it.
    """

    place: Place
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    socket: str | None = None
    quick: bool = False
    runs: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(slots=True)
class Report:
    """What was found, and what whoever asked needs to go on.

    Attributes:
        facts: `nodes`, the paths of the device nodes. With a configuration also `host`, `port`,
            `metrics`, `drain_timeout_s`, `load_timeout_s`, `lock_directory`, and of the files,
            by the names of their findings, `missing` and `denied`.
    """

    findings: list[Finding]
    facts: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict."""
        return {"checks": [one.to_json() for one in self.findings], "facts": self.facts}


def request_from(found: Mapping[str, Any]) -> Request:
    """Read what `Request.to_json` made."""
    return Request(
        place=place.from_json(found["place"]),
        argv=tuple(found["argv"]),
        environ=found["environ"],
        socket=found.get("socket"),  # an older command does not say
        quick=found["quick"],
        runs=found["runs"],
    )


def report_from(found: object) -> Report:
    """Read what `Report.to_json` made.

    Raises:
        BadReport: it is no report.
    """
    if not isinstance(found, Mapping):
        raise BadReport(f"{found!r} is no report")
    checks, facts = found.get("checks"), found.get("facts")
    if not isinstance(checks, list) or not isinstance(facts, Mapping):
        raise BadReport("there are no checks or no facts in it")
    return Report([from_json(one) for one in checks], dict(facts))
