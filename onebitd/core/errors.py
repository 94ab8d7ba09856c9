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

Every leaf says in its message what object it is about and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `onebitctl` starts faster without the records
    from onebitd.core.handoff import Reason


class OnebitError(Exception):
    """Base of everything onebitd raises on purpose."""

    exit_status = 1


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
        super().__init__(f"{message} (status {status})")
        self.status = status
        self.message = message


class StateFileError(OnebitError):
    """A state file that must not reach the decoder; the message tells its author what is wrong."""


class HandoffError(OnebitError):
    """One handoff failed; the decoder prefills by itself, or the client gets a 502 that says why.

    Args:
        reason: one word of the closed list.
        detail: a sentence for the log, the client and the provider's author.
        slot_touched: True once slot 0 may hold something of the failed handoff.
    """

    def __init__(self, reason: Reason, detail: str, *, slot_touched: bool = False) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.slot_touched = slot_touched


class RequestError(OnebitError):
    """The client gets this answer.

    Args:
        status: HTTP status.
        message: for a person; names the object and the next step.
        kind: llama-server's and OpenAI's error type words.
        retry_after_s: whole seconds for a Retry-After header.
        reason: the handoff record's reason, where there is one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        retry_after_s: int | None = None,
        reason: Reason | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.reason = reason

    def body(self) -> dict[str, object]:
        """Return the JSON body: `{"error": {"message", "type", "code"}}`."""
        return {"error": {"message": self.message, "type": self.kind, "code": self.status}}
