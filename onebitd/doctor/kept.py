"""What an instance keeps over restarts: its state directory, and the handoffs in it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Final

from onebitd.core import paths
from onebitd.core.config import Config
from onebitd.core.errors import OnebitError
from onebitd.core.handoff_filter import HandoffFilter
from onebitd.doctor import sight
from onebitd.doctor.finding import Finding, ok, skipped, warning
from onebitd.doctor.place import Place

_DIRECTORY: Final = "state.directory"
_HISTORY: Final = "state.history"


def check(config: Config, environ: Mapping[str, str], place: Place) -> list[Finding]:
    """Look at the directory and at the file of past handoffs; nothing is made or written."""
    if place.scope == "system" and not place.inside and not place.is_root:
        return [skipped(_DIRECTORY, "what the service keeps is seen by root and the service alone")]
    directory = paths.state_dir(config.instance, environ, os.geteuid())
    if not os.path.isdir(directory):
        return [skipped(_DIRECTORY, f"{directory} is made when the daemon starts")]
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        user = sight.own_name()
        text = f"{directory} cannot be written by {user}: costs and handoffs are not kept"
        fix = f"{place.sudo}chown -R {shlex.quote(user)} {shlex.quote(directory)}"
        return [warning(_DIRECTORY, text, fix)]
    return [ok(_DIRECTORY, f"{directory} can be written"), _history(directory)]


def _history(directory: str) -> Finding:
    from onebitd.adapters.history_store import read_records

    file = paths.history_file(directory)
    if not os.path.exists(file):
        return skipped(_HISTORY, f"{file} is made with the first handoff")
    try:
        read_records(file, HandoffFilter(limit=1))
    except OnebitError as error:
        return warning(_HISTORY, str(error))
    return ok(_HISTORY, f"{file} can be read")
