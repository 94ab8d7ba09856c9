"""Log events as entries of the journal (https://systemd.io/JOURNAL_NATIVE_PROTOCOL)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import struct
import time

from onebitd.adapters.log_lines import STALL_MS, Event, Sink, as_text, human

JOURNAL_SOCKET = "/run/systemd/journal/socket"
IDENTIFIER = "onebitd"

_PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
_NOT_FIELD_NAME = re.compile(r"[^A-Z0-9_]+")
_FIELD_NAME_CHARS = 64
_JOURNAL_GONE = (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTCONN, errno.EACCES, errno.EPERM)
_TOO_BIG = (errno.EMSGSIZE, errno.ENOBUFS)


class JournalSink:
    """Events as native journal entries; on `fallback` while there is no journal.

    Call `close` at the end.
    """

    def __init__(self, path: str, fallback: Sink) -> None:
        self._path = path
        self.fallback = fallback
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._lost = 0

    def emit(self, level: str, event: Event) -> None:
        """Send one entry; a journal that does not read for long costs entries, never a wait."""
        data = journal_entry(level, event)
        try:
            self._send(data)
        except BlockingIOError:
            self._lost += 1
        except OSError as exc:
            if exc.errno not in _JOURNAL_GONE:
                event = {**event, "journal_error": exc.strerror}
            self.fallback.emit(level, event)
        else:
            count, self._lost = self._lost, 0
            if count:
                self.emit("warning", {"event": "log_lines_lost", "count": count})

    def close(self) -> None:
        """Close the socket; later events go to the fallback."""
        self._socket.close()

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendto(data, self._path)
        except BlockingIOError:
            if self._lost:
                raise
            self._send_slowly(data)
        except OSError as exc:
            if exc.errno not in _TOO_BIG:
                raise
            self._send_as_file(data)

    def _send_slowly(self, data: bytes) -> None:
        # An unconnected datagram socket is always writable to poll, so look again a few times.
        for _ in range(4):
            time.sleep(STALL_MS / 4000)
            with contextlib.suppress(BlockingIOError):
                self._socket.sendto(data, self._path)
                return
        raise BlockingIOError(errno.EAGAIN, "the journal does not read")

    def _send_as_file(self, data: bytes) -> None:
        """Send an entry beyond the datagram limit: a sealed memfd, by SCM_RIGHTS."""
        fd = os.memfd_create("onebitd-journal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=i", fd))]
            self._socket.sendmsg([], rights, 0, self._path)
        finally:
            os.close(fd)


def journal_entry(level: str, event: Event) -> bytes:
    """Return the event as a datagram of the journal's native protocol."""
    fields = [
        ("MESSAGE", human(event)),
        ("PRIORITY", str(_PRIORITY.get(level, 6))),
        ("SYSLOG_IDENTIFIER", IDENTIFIER),
    ]
    for key, value in event.items():
        if key == "line" or value is None:
            continue
        name = "ONEBIT_" + _NOT_FIELD_NAME.sub("_", key.upper())
        fields.append((name[:_FIELD_NAME_CHARS], as_text(value)))
    return b"".join(_journal_field(name, value) for name, value in fields)


def _journal_field(name: str, value: str) -> bytes:
    data = value.encode("utf-8", "backslashreplace")
    if b"\n" not in data:
        return name.encode() + b"=" + data + b"\n"
    return name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"
