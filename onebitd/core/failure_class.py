"""What a failed handoff says about the provider.

| reason | class |
|---|---|
| `lock_busy` | busy |
| `provider_exit` | denied or busy by the provider's last words, else crash |
| `provider_timeout` | timeout; wedged when it is that a run cannot be killed |
| `provider_no_file`, `bad_state`, `restore_refused`, `restore_short`, `adopt_refused` | bad_state |

Any of these is `suspended` instead when the box slept meanwhile, but for a run that cannot be
killed. The others are not the provider's: `no_space` and `lock_unusable` cost a request nothing and
their own words are of more use than a breaker's; `client_gone`, `draining`, `queue_full` and
`internal` are the client's or ours; `backend_down`, `backend_refused`, `share_refused` and
`share_handshake` the decoder's.
"""

from __future__ import annotations

import enum
import re
from typing import Final

from onebitd.core.handoff import Reason


class FailureClass(enum.StrEnum):
    """What kind of failure it was, by what to expect of the next run."""

    BUSY = "busy"
    """Somebody else has the device, or all its contexts: soon over."""
    DENIED = "denied"
    """The system refused something: over when somebody has changed a setting."""
    TIMEOUT = "timeout"
    """No result within provider.timeout_s: a request has paid all of that."""
    CRASH = "crash"
    """It ended by a signal, or with a status that tells nothing better."""
    WEDGED = "wedged"
    """It cannot be killed, or the device does not answer: nothing more may be started."""
    BAD_STATE = "bad_state"
    """It ended well and what it wrote is of no use: a fault of the provider."""
    SUSPENDED = "suspended"
    """The box slept during the run: what failed then says little about the next one."""


_CLASS_OF_REASON: Final = {
    Reason.LOCK_BUSY: FailureClass.BUSY,
    Reason.PROVIDER_EXIT: FailureClass.CRASH,
    Reason.PROVIDER_TIMEOUT: FailureClass.TIMEOUT,
    Reason.PROVIDER_NO_FILE: FailureClass.BAD_STATE,
    Reason.BAD_STATE: FailureClass.BAD_STATE,
    Reason.RESTORE_REFUSED: FailureClass.BAD_STATE,
    Reason.RESTORE_SHORT: FailureClass.BAD_STATE,
    Reason.ADOPT_REFUSED: FailureClass.BAD_STATE,
}

_UNKILLABLE: Final = re.compile(
    r"(the provider|an earlier provider run) \(pid \d+\) cannot be killed"
)
_ENDED_BY_FAULT: Final = re.compile(r"signal (?!6\b)\d+")
"""Of a signal other than SIGABRT, with which C++ ends at an exception that nobody caught: then the
words say what it was, while what was said before a SIGSEGV need not have to do with it."""

_MEMORY_LOCK: Final = re.compile(
    r"memlock|\bmlock|(cannot|can't|could not|unable to|failed to) (lock|pin) |"
    r"\bmmap\b.*(resource temporarily unavailable|\bEAGAIN\b|\berr(no)?\W{0,3}11\b)|"
    r"locked memory",
    re.IGNORECASE,
)
"""The kernel's answer to an mmap that would lock more than it may is EAGAIN; amdxdna's buffers are
such, and XRT passes that answer on."""
_DENIED: Final = re.compile(
    r"permission denied|operation not permitted|access denied|not authorized|"
    r"\bE(ACCES|PERM)\b|\berr(no)?(:|=| )-?13\b|\berr(no)?(:|=| )1\b|is not an executable file",
    re.IGNORECASE,
)
_BUSY: Final = re.compile(
    r"(device or )?resource busy|device is busy|device busy|partition is busy|in use by another|"
    r"resource temporarily unavailable|\bE(BUSY|AGAIN)\b|\berr(no)?(:|=| )-?(16|11)\b|"
    r"(no|out of|too many|exhausted|not enough)( \w+){0,2} (hw ?|hardware )?"
    r"(contexts?|hwctx|partitions?)\b|"
    r"(contexts?|hwctx|partitions?)( \w+){0,2} (exhausted|unavailable|not available)",
    re.IGNORECASE,
)


def classify(reason: Reason, detail: str, *, slept: bool) -> FailureClass | None:
    """Return what a failed handoff says about the provider; None when that is nothing.

    Args:
        reason, detail: of the failure; of a run that ended, the detail is how, and its last words.
        slept: the box was suspended during the run.
    """
    kind = _CLASS_OF_REASON.get(reason)
    if kind is FailureClass.TIMEOUT and _UNKILLABLE.match(detail):
        return FailureClass.WEDGED
    if kind is not None and slept:
        return FailureClass.SUSPENDED
    if reason is Reason.PROVIDER_EXIT and not _ENDED_BY_FAULT.match(detail):
        if is_about_memory_lock(detail) or _DENIED.search(detail):
            return FailureClass.DENIED
        if _BUSY.search(detail):
            return FailureClass.BUSY
    return kind


def is_about_memory_lock(detail: str) -> bool:
    """Say whether a program's last words are about memory that it could not lock."""
    return _MEMORY_LOCK.search(detail) is not None
