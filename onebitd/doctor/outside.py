"""What is seen from outside of the service: unit, ports, drivers, and what its sandbox hides."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from onebitd.adapters import systemd_tools
from onebitd.doctor import daemon, devices, lock, port, sight, unit
from onebitd.doctor.finding import Finding, State, failed, skipped, warning
from onebitd.doctor.place import Place
from onebitd.doctor.port import Ours
from onebitd.doctor.service import Service


def amended(
    findings: Sequence[Finding], facts: Mapping[str, Any], place: Place, *, for_service: bool
) -> list[Finding]:
    """Hold what was found inside against what is seen here.

    Args:
        facts: of the report that the findings are in.
        for_service: they are about a service, wherever the checks ran.
    """
    checks = [_shown(one, facts, place) for one in findings]
    if for_service and place.scope == "system" and not place.inside and not place.is_root:
        checks = [_of_caller(one, facts, place) for one in checks]
    hidden: list[Finding] = []
    if place.inside and "nodes" in facts:
        hidden = devices.judge_hidden(facts["nodes"], devices.read_nodes(), place)
    if hidden:
        checks = [one for one in checks if one.name != devices.NO_NODES]
    return checks + hidden


def _shown(one: Finding, facts: Mapping[str, Any], place: Place) -> Finding:
    """Say of a file that is missing inside and is there outside that the sandbox hides it."""
    path = (facts.get("missing") or {}).get(one.name)
    if not place.inside or one.state is not State.FAILED or not path or not os.path.exists(path):
        return one
    what = one.message.partition(f" {path}")[0]
    return failed(one.name, sight.hidden_sentence(what, path), sight.show_fix(place, path))


def _of_caller(one: Finding, facts: Mapping[str, Any], place: Place) -> Finding:
    """Make a warning of what is closed to whoever asks, and perhaps not to the service."""
    is_closed = one.name in (facts.get("denied") or {}) or one.name.startswith("device.")
    if not is_closed or one.state in (State.OK, State.SKIPPED):
        return one
    text = f"{one.message} (so it is for {sight.own_name()}; the service may differ)"
    return warning(one.name, text, place.as_root)


def check(
    found: Service | None,
    facts: Mapping[str, Any],
    place: Place,
    environ: Mapping[str, str],
    socket: str | None,
) -> list[Finding]:
    """Return what is checked from here: unit, daemon, ports, drivers, the lock's place.

    Args:
        facts: of the report from inside.
        socket: the daemon's; None: to be looked for.
    """
    status, why_not = None, None
    if found is None or found.runs:
        status, why_not = daemon.ask(place.instance, environ, socket)
    findings = daemon.judge(status, why_not, place)
    findings += [*devices.check_drivers(devices.read_nodes(), place), *devices.check_users()]
    if "host" in facts:
        runs = status is not None or (found is not None and found.runs)
        findings += _ports(facts, Ours.of(status, runs=runs), place)
    if place.inside:
        compared = lock.compare(facts.get("lock_directory"), place)
        findings += [compared] if compared is not None else []
    if found is None:
        findings.append(skipped("service", "there is no service"))
        return findings
    masked = unit.masked_drop_ins(place, unit.directories(place, environ))
    return [*findings, *unit.judge(found.shown, masked, facts, place)]


def _ports(facts: Mapping[str, Any], ours: Ours, place: Place) -> list[Finding]:
    host, number = str(facts.get("host")), int(facts.get("port") or 0)
    has_unit = _has_socket_unit(place)
    found = [port.check(host, number, ours, place, has_socket_unit=has_unit)]
    host, colon, text = str(facts.get("metrics") or "").rpartition(":")
    if colon and text.isdigit():
        metrics = port.check(host, int(text), ours, place)
        message = metrics.message.replace("http.port", "metrics.listen")
        found.append(dataclasses.replace(metrics, name="port.metrics", message=message))
    return found


def _has_socket_unit(place: Place) -> bool:
    name = f"onebitd-http@{place.instance}.socket"
    return place.scope == "system" and is_active(place, name)


def is_active(place: Place, unit_name: str) -> bool:
    """Ask the manager of an instance whether a unit is active."""
    user = ("--user",) if place.scope == "user" else ()
    return systemd_tools.run("systemctl", *user, "is-active", "--quiet", unit_name).status == 0
