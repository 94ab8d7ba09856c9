"""A daemon and the decoder behind it, asked the same in the same state of the slot."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.e2e.differential import (
    OWN_FIELDS,
    Answer,
    Request,
    ask_decoder,
    ask_onebitd,
    differences,
)
from tests.e2e.differential_cases import Case
from tests.e2e.rig import Prepared, Rig, running_rig
from tests.llama_builds import MODELS, LlamaBuild, short_temporary_directory

BACKEND_ARGS = ("-c", "1024", "-t", "1", "-b", "128", "-ub", "128", "--metrics")
NEVER = "X-Onebit-Handoff: never"
HANDOFF_TARGETS = ("/v1/completions", "/v1/chat/completions")
ONE_LETTER = 'root ::= "a"'
"""A reply of no tokens is one token, all the same; some builds fail on part of a character."""


@dataclasses.dataclass(frozen=True)
class Both:
    """A daemon whose provider hands out the decoder's own states, and its decoder."""

    rig: Rig

    @property
    def backend(self) -> Path:
        """The decoder's private socket."""
        return self.rig.daemon.runtime / "backend.sock"

    def direct(self, request: Request) -> Answer:
        """Ask the decoder."""
        return ask_decoder(self.backend, request)

    def through(self, request: Request) -> Answer:
        """Ask onebitd."""
        return ask_onebitd(self.rig.daemon.port, request)

    def call(self, target: str, body: Any) -> Any:
        """Post to the decoder and return its answer, which must be good."""
        answer = self.direct(Request("POST", target, body))
        assert answer.status == 200, answer
        return json.loads(answer.body)

    def empty_slot(self) -> None:
        """Leave nothing that the next prompt could begin with."""
        self.call("/slots/0?action=erase", {})

    def ids_of(self, request: Request) -> list[int]:
        """Return what the decoder will evaluate for a completion or a chat."""
        body = request.body
        text = body.get("prompt")
        if text is None:
            text = self.call("/apply-template", body)["prompt"]
        asked = {"content": text, "add_special": True, "parse_special": True}
        return list(self.call("/tokenize", asked)["tokens"])

    def fill_slot(self, ids: list[int]) -> None:
        """Have the decoder evaluate these ids."""
        body = {"prompt": ids, "n_predict": 0, "grammar": ONE_LETTER}
        self.call("/completion", {**body, "id_slot": 0, "cache_prompt": False})

    def prepare_state(self, ids: list[int]) -> None:
        """Have the decoder evaluate and save these ids, and let the provider hand that out."""
        self.fill_slot(ids)
        self.call("/slots/0?action=save", {"filename": "wanted"})
        saved = self.rig.daemon.runtime / "slots" / "wanted"
        (self.rig.states / f"{len(ids)}.bin").write_bytes(saved.read_bytes())
        saved.unlink()

    def wrong_when_passed(self, case: Case) -> list[str]:
        """Return what is not the decoder's in onebitd's reply without a handoff."""
        request = case.request
        on_route = request.method == "POST" and request.target in HANDOFF_TARGETS
        if on_route:
            request = dataclasses.replace(request, headers=(*request.headers, NEVER))
        if case.leftovers:
            self.direct(request)
        answers = []
        for ask in (self.direct, self.through):
            if case.generates:
                self.empty_slot()
            answers.append(ask(request))
        direct, through = answers
        found = differences(direct, through, missing=case.missing)
        if direct.status not in case.status:
            found.append(f"the decoder itself answers {direct.status} {direct.body[:200]!r}")
        if through.added_headers() != (OWN_FIELDS if on_route else set()):
            found.append(f"added {through.added_headers()}")
        return found

    def wrong_when_handed_off(self, case: Case) -> list[str]:
        """Return what is not the decoder's in onebitd's reply after a handoff.

        The decoder itself has evaluated all but the last token before, as a provider does.
        """
        ids = self.ids_of(case.request)
        self.prepare_state(ids[:-1])
        body = {**case.request.body, "id_slot": 0, "cache_prompt": True}
        direct = self.direct(dataclasses.replace(case.request, body=body))
        self.empty_slot()
        through = self.through(case.request)
        found = differences(direct, through)
        if direct.status not in case.status:
            found.append(f"the decoder itself answers {direct.status} {direct.body[:200]!r}")
        if through.field(b"x-onebit-handoff") != b"file":
            found.append(f"no handoff: {through.headers}")
        if through.added_headers() != OWN_FIELDS - {b"x-onebit-reason"}:
            found.append(f"added {through.added_headers()}")
        return found


@contextlib.contextmanager
def running_both(build: LlamaBuild) -> Iterator[Both]:
    """Run a daemon on a build; every handoff that is not asked away is made."""
    build.require()
    MODELS[0].require()
    with short_temporary_directory() as home:
        nothing = home / "none"
        nothing.mkdir()
        prepared = Prepared(nothing, {}, {}, b"")
        with running_rig(prepared, build, MODELS[0], home, backend_args=BACKEND_ARGS) as rig:
            yield Both(rig)
