"""The share handshake on the wire (onebit-provider(7)): bytes and descriptors in, a message out.

One message: a 4-byte little-endian length, then that many bytes of JSON in UTF-8, with the
descriptors as SCM_RIGHTS on its first byte. The JSON holds at least `share_id`. Sans-I/O and
bounded: whoever reads the socket feeds what came, and closes the descriptors when this refuses.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from onebitd.core.errors import HandoffError
from onebitd.core.handoff import Reason

MAX_HEADER_BYTES: Final = 1 << 20
"""A layout of a thousand layers takes a quarter of this."""
MAX_FDS: Final = 64
"""A decoder exports one descriptor for each buffer of its cache, a handful."""
_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class ShareMessage:
    """What the decoder sent.

    Attributes:
        share_id: names the share in the adopt request.
        header: the JSON, as it came.
        fds: the descriptors, in the order in which they arrived; whoever fed them owns them.
    """

    share_id: int
    header: bytes
    fds: tuple[int, ...]


class ShareReceiver:
    """Reads one message, in whatever pieces it comes."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._fds: list[int] = []

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> ShareMessage | None:
        """Take what one read returned; the message once it is whole.

        Args:
            data: no bytes mean the end of the stream.
            fds: the descriptors that came with them.

        Raises:
            HandoffError: SHARE_HANDSHAKE; it is no such message.
        """
        if fds and self._held:
            raise _refused("descriptors came later than with the first byte")
        self._fds += fds
        if len(self._fds) > MAX_FDS:
            raise _refused(f"it sent {len(self._fds)} descriptors, {MAX_FDS} at most are taken")
        if not data:
            raise _refused(f"it closed after {len(self._held)} bytes, before its message was whole")
        self._held += data
        if len(self._held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._held)
        if not 0 < length <= MAX_HEADER_BYTES:
            raise _refused(f"its length is {length}, 1 to {MAX_HEADER_BYTES} bytes are taken")
        missing = _LENGTH.size + length - len(self._held)
        if missing > 0:
            return None
        if missing < 0:
            raise _refused(f"{-missing} bytes came behind its message")
        header = bytes(self._held[_LENGTH.size :])
        return ShareMessage(_share_id(header), header, self._checked_fds())

    def _checked_fds(self) -> tuple[int, ...]:
        if not self._fds:
            raise _refused("no descriptor came with it")
        return tuple(self._fds)


def encode(header: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message; the descriptors go with the first of them."""
    data = json.dumps(header).encode()
    return _LENGTH.pack(len(data)) + data


def _share_id(header: bytes) -> int:
    try:
        found = json.loads(header.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise _refused("it is no JSON") from None
    share_id = found.get("share_id") if isinstance(found, dict) else None
    if isinstance(share_id, bool) or not isinstance(share_id, int) or not 0 <= share_id < 1 << 63:
        raise _refused("its JSON has no share_id that is a number")
    return share_id


def _no_constant(word: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python would take and no provider's JSON reader has to."""
    raise ValueError(word)


def _refused(what: str) -> HandoffError:
    return HandoffError(Reason.SHARE_HANDSHAKE, f"the decoder's share message: {what}")
