"""The service manager: what it passed in the environment, and what it is told.

Around the sdnotify library, which sends on a blocking socket, swallows every error and encodes
Latin-1; see `_NotifySocket`. The protocol is sd_notify(3) and sd_listen_fds(3).
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import MutableMapping

import sdnotify

from onebitd.core.errors import ConfigError
from onebitd.core.own_unit import OwnUnit, unit_in

FIRST_PASSED_FD = 3
"""SD_LISTEN_FDS_START."""

_VARIABLES = (
    "NOTIFY_SOCKET",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
)


class ServiceManager:
    """systemd, or whoever else speaks its protocol; every method is a no-op without one.

    Nothing here waits: a notification that does not fit the socket's queue is dropped, except
    READY and STOPPING, which go out with the next one.

    Args:
        environ: where the manager's variables are; all six are removed at once, so that no child
            inherits them. Only `os.environ` reaches the notification socket: the library reads
            `NOTIFY_SOCKET` there.

    Raises:
        ConfigError: the passed descriptors are not what the variables say.

    Call `close` at the very end. The passed descriptors belong to whoever asked for them.
    """

    def __init__(self, environ: MutableMapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._notifier = _NotifySocket.from_environ(environ)
        taken = {name: environ.pop(name, "") for name in _VARIABLES}
        self._unsent: list[str] = []
        self._watchdog_interval_s = _watchdog_interval_s(taken)
        try:
            self._fds = _passed_fds(taken)
        except ConfigError:
            self.close()
            raise

    @property
    def present(self) -> bool:
        """True when there is a manager that listens to notifications."""
        return self._notifier is not None

    def unit(self) -> OwnUnit | None:
        """Return the service of systemd that this process is, None where it cannot be told."""
        if not self.present:
            return None  # a program that a service has started is not that service
        try:
            with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
                return unit_in(file.read())
        except OSError:
            return None

    @property
    def watchdog_interval_s(self) -> float | None:
        """How often to call `watchdog`, in seconds: half the limit; None without a watchdog."""
        return self._watchdog_interval_s

    def listen_fds(self) -> dict[str, list[int]]:
        """Return the passed sockets by FileDescriptorName=, in the manager's order.

        They are close-on-exec already. A name is shared by all the Listen lines of one socket
        unit; "unknown" stands for no name.
        """
        return {name: list(fds) for name, fds in self._fds.items()}

    def ready(self, status: str | None = None) -> None:
        """Tell that the start is complete."""
        self._send("READY=1" + _status_line(status), must_arrive=True)

    def status(self, text: str) -> None:
        """Set the line that `systemctl status` shows."""
        self._send(_status_line(text).lstrip("\n"))

    def stopping(self, status: str | None = None) -> None:
        """Tell that the stop has begun."""
        self._send("STOPPING=1" + _status_line(status), must_arrive=True)

    def extend_timeout(self, seconds: float) -> None:
        """Ask for `seconds` more, counted from now; say it again before they end.

        Works while starting and while stopping.
        """
        self._send(f"EXTEND_TIMEOUT_USEC={max(1, int(seconds * 1_000_000))}")

    def watchdog(self) -> None:
        """Tell that the loop is alive."""
        if self._watchdog_interval_s is not None:
            self._send("WATCHDOG=1")

    def close(self) -> None:
        """Close the notification socket; every later call is a no-op."""
        if self._notifier is not None:
            self._notifier.close()
            self._notifier = None

    def _send(self, state: str, *, must_arrive: bool = False) -> None:
        if self._notifier is None:
            return
        while self._unsent and self._notifier.send(self._unsent[0]):
            del self._unsent[0]
        # Nothing overtakes what is left: READY goes out before STOPPING.
        sent = not self._unsent and self._notifier.send(state)
        if must_arrive and not sent:
            self._unsent.append(state)


class _NotifySocket:
    """sdnotify's notifier made non-blocking, honest about failures, and UTF-8."""

    def __init__(self, notifier: sdnotify.SystemdNotifier) -> None:
        self._notifier = notifier
        notifier.socket.setblocking(False)

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> _NotifySocket | None:
        # Without the variable, or when connecting fails, the library drops an open socket on the
        # floor: do not ask it without need, and let no ResourceWarning through.
        if not environ.get("NOTIFY_SOCKET"):
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            notifier = sdnotify.SystemdNotifier()
        return None if notifier.socket is None else cls(notifier)

    def send(self, state: str) -> bool:
        """Send one datagram; False when it could not be sent at once."""
        # debug=True is how the library lets an error out.
        self._notifier.debug = True
        # It encodes Latin-1, the manager reads UTF-8: hand it the UTF-8 bytes as Latin-1 text.
        text = state.encode("utf-8", "replace").decode("latin-1")
        try:
            self._notifier.notify(text)
        except OSError:
            return False
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._notifier.socket.close()


def _status_line(text: str | None) -> str:
    return "" if text is None else "\nSTATUS=" + " ".join(text.split())


def _watchdog_interval_s(taken: dict[str, str]) -> float | None:
    if taken["WATCHDOG_PID"] and taken["WATCHDOG_PID"] != str(os.getpid()):
        return None
    try:
        limit_us = int(taken["WATCHDOG_USEC"])
    except ValueError:
        return None
    return limit_us / 2_000_000 if limit_us > 0 else None


def _passed_fds(taken: dict[str, str]) -> dict[str, list[int]]:
    """Return the descriptors by name, close-on-exec; {} when they are meant for another process."""
    if not taken["LISTEN_FDS"] or taken["LISTEN_PID"] != str(os.getpid()):
        return {}
    try:
        count = int(taken["LISTEN_FDS"])
    except ValueError:
        raise ConfigError([f"LISTEN_FDS is not a number: {taken['LISTEN_FDS']!r}"]) from None
    names = taken["LISTEN_FDNAMES"].split(":") if taken["LISTEN_FDNAMES"] else []
    found: dict[str, list[int]] = {}
    for index in range(count):
        fd = FIRST_PASSED_FD + index
        try:
            os.set_inheritable(fd, False)
        except OSError as exc:
            raise ConfigError(
                [f"LISTEN_FDS={count}, but descriptor {fd} is not open: {exc.strerror}"]
            ) from exc
        name = names[index] if index < len(names) and names[index] else "unknown"
        found.setdefault(name, []).append(fd)
    return found
