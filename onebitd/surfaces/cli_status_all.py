"""`onebitctl status --all`: each instance that runs, or should, in one to three lines."""

from __future__ import annotations

import datetime as dt
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from onebitd import client
from onebitd.adapters import systemd_tools, unit_states
from onebitd.adapters.unit_states import UnitState
from onebitd.client import ClientError, NoDaemon
from onebitd.core import paths
from onebitd.core.errors import OnebitError
from onebitd.surfaces import cli_problems, cli_status, cli_units_words
from onebitd.surfaces.cli_status_command import (
    EXIT_NOT_FINE,
    NOT_OURS,
    Look,
    ask,
    is_fine,
    not_ours,
)
from onebitd.surfaces.cli_text import clean, cut, duration, milliseconds, paint, part_of, wrap

TIMEOUT_S: Final = 2.0
"""For each step of asking one daemon; all are asked at once."""
_PATIENCE_S: Final = 3 * TIMEOUT_S
_EXIT_NO_DAEMON: Final = 3
_LEAST_NAME_COLUMNS: Final = 8


class Seen(NamedTuple):
    """One instance.

    Args:
        name: of it.
        socket: its control socket, None when it has none.
        status: what it said, None when it did not.
        error: why not.
        exit_status: that a status of this one alone would end with.
        unit: its service, where systemd knows one that does not run.
    """

    name: str
    socket: str | None
    status: dict[str, Any] | None = None
    error: str | None = None
    exit_status: int = 0
    unit: UnitState | None = None


def look() -> Look:
    """Look at all instances, at once; none at all is NoDaemon's message."""
    now = dt.datetime.now(dt.UTC)
    seen = _see_all(now)
    if not seen:
        return _nobody()
    documents = [_document(one) for one in seen]
    return Look(
        lambda columns, colour: all_page(seen, now, colour=colour, columns=columns),
        documents,
        max(one.exit_status for one in seen),
    )


def all_page(seen: Sequence[Seen], now: dt.datetime, *, colour: bool, columns: int) -> str:
    """Return a block of one to three lines for each instance."""
    names = [clean(one.name) for one in seen]
    wide = max(_LEAST_NAME_COLUMNS, *map(len, names)) + 2
    lines = []
    for one, name in zip(seen, names, strict=True):
        head, name_paint, more, more_paint = _block(one, now)
        text = wrap(head, name.ljust(wide), " " * wide, max(columns, wide + 20))
        lines.append(text[0][:wide] + _painted_state(text[0][wide:], name_paint, colour))
        body = [line for each in more for line in wrap(each, " " * wide, " " * wide, columns)]
        shown = _at_most_two([*text[1:], *body], columns)
        lines += [paint(line, more_paint, colour) if more_paint else line for line in shown]
    return "\n".join(lines)


def _at_most_two(lines: Sequence[str], columns: int) -> list[str]:
    if len(lines) <= 2:
        return list(lines)
    return [
        lines[0],
        cut(f"{lines[1]} …", columns)
        if len(lines[1]) < columns - 1
        else f"{lines[1][: columns - 1]}…",
    ]


def _painted_state(text: str, name: str, colour: bool) -> str:
    for end, letter in enumerate(text):
        if letter in ", (:":
            return paint(text[:end], name, colour) + text[end:]
    return paint(text, name, colour)


def _block(one: Seen, now: dt.datetime) -> tuple[str, str, list[str], str]:
    """Return the first line, the colour of its first word, the other lines and their colour."""
    if one.status is None:
        rests = one.exit_status == 0
        return clean(one.error or "?"), "dim" if rests else "red", [], ""
    try:
        return _running_block(one.status, now)
    except NOT_OURS:
        return not_ours(one.status), "yellow", [], ""


def _running_block(status: Mapping[str, Any], now: dt.datetime) -> tuple[str, str, list[str], str]:
    parts = [cli_status.state_words(status), f"up {duration(status.get('uptime_s'))}"]
    parts += filter(None, (cli_status.addresses(status), cli_status.answer_words(status)))
    problems = cli_problems.find_problems(status, now)
    state_paint = {"ready": "green", "failed": "red"}.get(str(status.get("state")), "yellow")
    if problems:
        return clean(", ".join(parts)), state_paint, [" ".join(problems)], "yellow"
    return clean(", ".join(parts)), state_paint, [_figures(status)], ""


def _figures(status: Mapping[str, Any]) -> str:
    """Return e.g. `last 50: 46 used, first byte 101 ms, about 25 s saved; idle, 0 waiting`."""
    recent, slot = part_of(status, "recent"), part_of(status, "slot")
    used = part_of(recent, "used")
    facts = []
    if recent.get("count"):
        facts.append(f"last {recent['count']}: {used.get('count', '?')} used")
        if isinstance(used.get("first_byte_ms"), float):
            facts.append(f"first byte {milliseconds(used['first_byte_ms'])}")
        if isinstance(used.get("saved_sum_ms"), float):
            facts.append(f"about {_signed_duration(used['saved_sum_ms'])} saved")
    else:
        facts.append("no handoffs yet")
    doing = str(slot.get("phase") or "busy") if slot.get("busy") else "idle"
    waiting = part_of(status, "queue").get("pending", "?")
    return clean(f"{', '.join(facts)}; {doing}, {waiting} waiting")


def _signed_duration(ms: float) -> str:
    return f"{'-' if ms < 0 else ''}{duration(abs(ms) / 1000.0)}"


def _see_all(now: dt.datetime) -> list[Seen]:
    uid = os.geteuid()
    units = _units(uid)
    asleep = {
        f"{paths.SYSTEM_RUNTIME}/{unit.instance}/{paths.CONTROL_SOCKET}"
        for unit in units
        if unit.is_asleep and not unit.of_user
    }
    roots = client.search_roots(os.environ, uid)
    found = client.find_instances(roots, passed_over=asleep)
    seen = [
        Seen(one.name, one.socket, None, client.describe_denied(one.socket), 4)
        for one in found
        if one.state == "denied"
    ]
    seen += _ask_each([(one.name, one.socket) for one in found if one.state == "running"])
    there = {one.name for one in seen}
    for unit in units:
        if unit.instance not in there and (unit.is_missing or unit.is_asleep):
            seen.append(_seen_unit(unit, now.timestamp()))
    return sorted(seen, key=lambda one: (one.name, one.socket or ""))


def _ask_each(wanted: Sequence[tuple[str, str]]) -> list[Seen]:
    """Ask daemons at once: one that does not answer holds up no other."""
    answers: dict[str, Seen] = {}

    def ask_one(name: str, socket: str) -> None:
        try:
            status = ask(socket, TIMEOUT_S)
        except ClientError as error:
            answers[socket] = Seen(name, socket, None, str(error), error.exit_status)
            return
        fine = is_fine(status, dt.datetime.now(dt.UTC))
        answers[socket] = Seen(name, socket, status, None, 0 if fine else EXIT_NOT_FINE)

    threads = [threading.Thread(target=ask_one, args=pair, daemon=True) for pair in wanted]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"it has not answered completely within {_PATIENCE_S:g} s: look at its log"
    return [
        answers.get(socket, Seen(name, socket, None, late, _EXIT_NO_DAEMON))
        for name, socket in wanted
    ]


def _units(uid: int) -> list[UnitState]:
    if not systemd_tools.is_booted():
        return []
    scopes = [False] if uid == 0 else [False, True]
    return [unit for of_user in scopes for unit in unit_states.find_units(of_user=of_user)]


def _seen_unit(unit: UnitState, now: float) -> Seen:
    words = cli_units_words.unit_words(unit, now).removeprefix("is ").removeprefix("has ")
    if unit.is_asleep and unit.active != "failed":
        return Seen(unit.instance, None, None, words, 0, unit)
    helps = f"`{cli_units_words.journalctl(unit)}`"
    if unit.active in ("failed", "inactive"):
        helps = f"`{cli_units_words.systemctl(unit, 'start')}`, {helps}"
    return Seen(unit.instance, None, None, f"{words}; {helps}", _EXIT_NO_DAEMON, unit)


def _document(one: Seen) -> dict[str, Any]:
    if one.status is not None:
        return one.status
    document: dict[str, Any] = {"instance": one.name, "state": None, "error": one.error}
    if one.unit is not None:
        document["unit"] = one.unit._asdict()
    return document


def _nobody() -> Look:
    try:
        client.choose_socket(None, os.environ, os.geteuid())
        error: OnebitError = NoDaemon("no onebitd runs here any more")
    except OnebitError as found:
        error = found
    problem = error if isinstance(error, ClientError) else NoDaemon(str(error))
    document = {"instance": None, "state": None, "error": str(problem)}
    return Look(lambda columns, colour: str(problem), [document], problem.exit_status, problem)
