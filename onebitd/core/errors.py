"""The error tree.

    OnebitError
    |-- UsageError                exit 2: the command line
    |-- ConfigError               exit 2: the configuration, every problem at once
    |-- GgufError                 not a GGUF file (core/gguf_header)
    |-- SpawnError                a program cannot be started (adapters/process)
    |-- ShareLayoutError          a shared memory's header cannot be (core/share_layout)
    |-- UnitFilesError            units cannot be installed or removed (core/unit_layout)
    |-- CostFileError             learned costs cannot be kept (adapters/cost_file)
    |-- HistoryFileError          past handoffs cannot be kept or read (adapters/history_errors)
    |   |-- NoHistory             exit 3: there are none
    |   |-- HistoryDenied         exit 4: not by this user
    |   |-- HistoryDamaged        the file is not what a daemon wrote
    |   `-- HistoryTooNew         a later onebitd wrote it
    |-- NeedsRoot                 exit 4: only root may do this (surfaces/cli_units)
    |-- ClientError               a question to the control socket has no answer (client)
    |-- InstanceTaken             exit 3: another process has this instance or port
    |-- BackendFailed             exit 4: the decoder cannot be started or kept running
    |-- BackendError              the decoder did not do what it was asked (adapters/llama_server)
    |   |-- BackendGone           its connection broke or was refused
    |   |-- BackendTimeout        it did not answer in time
    |   `-- BackendRefused        it answered with an error status
    |-- StateFileError            not a state file that this decoder can be given
    |-- HandoffError              a handoff failed; `reason` and `detail` say why
    `-- RequestError              the client gets this: status, type, message, maybe Retry-After

Every leaf says in its message what object it is about and what to do next. What another program
said, or a client, is never formatted into that message: it is given as `quoted`, and the `wording`
has the sentence with it and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onebitd.core.wording import Wording

if TYPE_CHECKING:  # `onebitctl` starts faster without the records
    from onebitd.core.handoff import Reason


class OnebitError(Exception):
    """Base of everything onebitd raises on purpose.

    Args:
        message: in onebitd's own words, with its next step; or both wordings of it.
        quoted: what another program said, or a client; it follows the message.

    Attributes:
        wording: of the message, with and without those words.
    """

    exit_status = 1

    def __init__(self, message: str | Wording = "", *, quoted: str = "") -> None:
        if isinstance(message, str):
            message = Wording.of(message, quoted)
        super().__init__(message.full)
        self.wording = message


class UsageError(OnebitError):
    """The command line cannot be carried out; the message names the flag and why."""

    exit_status = 2


class ConfigError(OnebitError):
    """The configuration is wrong; `problems` holds one line for each fault found."""

    exit_status = 2

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class InstanceTaken(OnebitError):
    """Another process has this instance or this port; the message names it."""

    exit_status = 3


class BackendFailed(OnebitError):
    """The decoder could not be started or kept running."""

    exit_status = 4


class BackendError(OnebitError):
    """The decoder did not do what it was asked."""


class BackendGone(BackendError):
    """The connection to the decoder was refused or broke before the reply was complete."""


class BackendTimeout(BackendError):
    """The decoder did not answer in time."""


class BackendRefused(BackendError):
    """The decoder answered with an error status.

    Args:
        status: HTTP status of the answer.
        message: the decoder's own words (`error.message`), or the start of the body.
    """

    def __init__(self, status: int, message: str) -> None:
        brief = Wording.of(f"the decoder refused it with status {status}", message).brief
        super().__init__(Wording(f"{message} (status {status})", brief))
        self.status = status
        self.message = message


class StateFileError(OnebitError):
    """A state file that must not reach the decoder; the message tells its author what is wrong."""


class HandoffError(OnebitError):
    """One handoff failed; the decoder prefills by itself, or the client gets a 502 that says why.

    Args:
        reason: one word of the closed list.
        detail: a sentence for the log, the client and the provider's author, in onebitd's own
            words; or both wordings of it, those of the error that it comes from, for instance.
        quoted: what another program said; it follows the sentence.
        slot_touched: True once slot 0 may hold something of the failed handoff.

    Attributes:
        detail: with what was quoted.
        why: both wordings of the detail.
    """

    def __init__(
        self,
        reason: Reason,
        detail: str | Wording,
        *,
        quoted: str = "",
        slot_touched: bool = False,
    ) -> None:
        self.why = Wording.of(detail, quoted) if isinstance(detail, str) else detail
        super().__init__(self.why.behind(f"{reason}: "))
        self.reason = reason
        self.detail = self.why.full
        self.slot_touched = slot_touched


class RequestError(OnebitError):
    """The client gets this answer.

    Args:
        status: HTTP status.
        message: for a person; names the object and the next step.
        quoted: what another program or the client said; it follows the message.
        kind: llama-server's and OpenAI's error type words.
        retry_after_s: whole seconds for a Retry-After header.
        reason: the handoff record's reason, where there is one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        quoted: str = "",
        kind: str = "invalid_request_error",
        retry_after_s: int | None = None,
        reason: Reason | None = None,
    ) -> None:
        super().__init__(message, quoted=quoted)
        self.status = status
        self.message = self.wording.full
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.reason = reason

    def body(self) -> dict[str, object]:
        """Return the JSON body: `{"error": {"message", "type", "code"}}`."""
        return {"error": {"message": self.message, "type": self.kind, "code": self.status}}
