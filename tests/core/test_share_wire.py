"""The share handshake's codec: the same message however it arrives, and every refusal."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebitd.core.errors import HandoffError
from onebitd.core.handoff import Reason
from onebitd.core.share_wire import MAX_FDS, MAX_HEADER_BYTES, ShareReceiver, encode
from tests.core.test_http1 import cuts, split

HEADER: dict[str, Any] = {"share_id": 7, "layout": 1, "name": "café", "tensors": [{"a": [1, 2]}]}
WIRE = encode(HEADER)


def refused(pieces: list[tuple[bytes, list[int]]]) -> str:
    """Feed pieces to a new receiver, which refuses the last one; return the detail."""
    receiver = ShareReceiver()
    *before, (last, last_fds) = pieces
    for data, fds in before:
        assert receiver.feed(data, fds) is None
    with pytest.raises(HandoffError) as caught:
        receiver.feed(last, last_fds)
    assert caught.value.reason is Reason.SHARE_HANDSHAKE
    assert not caught.value.slot_touched
    return caught.value.detail


def packed(body: bytes) -> bytes:
    """Return a message with any body."""
    return struct.pack("<I", len(body)) + body


@given(
    cuts,
    st.lists(st.integers(3, 1 << 20), min_size=1, max_size=MAX_FDS),
    st.integers(0, (1 << 63) - 1),
    st.text(max_size=200),
)
def test_receiver_any_cuts_give_the_same_message(
    where: list[int], fds: list[int], share_id: int, text: str
) -> None:
    """The message does not depend on how its bytes were split on their way."""
    header = {"share_id": share_id, "text": text}
    wire = encode(header)
    pieces = split(wire, where)
    receiver = ShareReceiver()
    found = [
        receiver.feed(piece, () if index else fds)
        for index, piece in enumerate(piece for piece in pieces if piece)
    ]
    message = found.pop()
    assert found == [None] * len(found)
    assert message is not None
    assert (message.share_id, message.fds) == (share_id, tuple(fds))
    assert message.header == wire[4:]
    assert json.loads(message.header) == header


def test_receiver_byte_by_byte_is_whole_with_the_last_one() -> None:
    """Not a byte sooner, and not one is waited for in vain."""
    receiver = ShareReceiver()
    for at in range(len(WIRE) - 1):
        assert receiver.feed(WIRE[at : at + 1], [5] if at == 0 else []) is None
    message = receiver.feed(WIRE[-1:])
    assert message is not None
    assert message.fds == (5,)


@pytest.mark.parametrize("length", range(len(WIRE)))
def test_receiver_early_close_after_any_byte_is_refused(length: int) -> None:
    """Half a message is no message, wherever it ends."""
    pieces = [(WIRE[:length], [5])] if length else []
    assert f"closed after {length} bytes" in refused([*pieces, (b"", [])])


@given(st.binary(max_size=64), cuts)
def test_receiver_any_bytes_give_a_message_or_a_refusal(data: bytes, where: list[int]) -> None:
    """Garbage is never another exception."""
    receiver = ShareReceiver()
    with contextlib.suppress(HandoffError):
        for index, piece in enumerate(split(data, where)):
            receiver.feed(piece, [] if index else [5])
        receiver.feed(b"")


@pytest.mark.parametrize("length", [0, MAX_HEADER_BYTES + 1, 0x80000000, 0xFFFFFFFF])
def test_receiver_impossible_length_is_refused_with_its_fourth_byte(length: int) -> None:
    """Nothing is collected for a length that will not be taken."""
    receiver = ShareReceiver()
    start = struct.pack("<I", length)
    assert receiver.feed(start[:3], [5]) is None
    with pytest.raises(HandoffError, match=f"its length is {length}, 1 to"):
        receiver.feed(start[3:])


def test_receiver_longest_header_is_taken() -> None:
    """The bound itself is inside."""
    body = b'{"share_id": 1, "x": "' + b"x" * (MAX_HEADER_BYTES - 24) + b'"}'
    assert len(body) == MAX_HEADER_BYTES
    message = ShareReceiver().feed(packed(body), [5])
    assert message is not None
    assert len(message.header) == MAX_HEADER_BYTES


@pytest.mark.parametrize(
    "body",
    [
        b"x",
        b"{",
        b'{"share_id": 1',
        b'{"share_id": 1} {}',
        b'{"share_id": 1}\x00',
        b"\xff\xfe",
        b'{"share_id": 1, "x": "\xe9"}',
        b'\xef\xbb\xbf{"share_id": 1}',
        '{"share_id": 1}'.encode("utf-16-le"),
        b'{"share_id": 1, "x": NaN}',
        b'{"share_id": -Infinity}',
        b'{"share_id": 1, "x": ' + b"9" * 5000 + b"}",
        b"[" * 200_000,
    ],
    ids=[
        "letter", "open", "cut", "two", "zero", "bytes", "latin1", "bom", "utf16", "nan",
        "infinity", "digits", "deep",
    ],
)  # fmt: skip
def test_receiver_bad_json_is_refused(body: bytes) -> None:
    """What another JSON reader may not take is not passed on, and no reader is brought down."""
    assert refused([(packed(body), [5])]) == "the decoder's share message: it is no JSON"


@pytest.mark.parametrize(
    "body",
    [
        "{}", "[]", "1", "null", '"share_id"', "[1]",
        '{"share_id": null}', '{"share_id": true}', '{"share_id": false}', '{"share_id": -1}',
        '{"share_id": 1.0}', '{"share_id": 1e3}', '{"share_id": "1"}', '{"share_id": [1]}',
        '{"share_id": 9223372036854775808}', '{"SHARE_ID": 1}',
    ],
)  # fmt: skip
def test_receiver_without_a_share_id_is_refused(body: str) -> None:
    """The adopt request needs a whole number that any decoder's integer holds."""
    assert refused([(packed(body.encode()), [5])]).endswith("has no share_id that is a number")


@pytest.mark.parametrize("share_id", [0, 1, (1 << 63) - 1])
def test_receiver_smallest_and_largest_share_id_are_taken(share_id: int) -> None:
    """The bounds themselves are inside."""
    message = ShareReceiver().feed(encode({"share_id": share_id}), [5])
    assert message is not None
    assert message.share_id == share_id


def test_receiver_without_descriptors_is_refused() -> None:
    """There is nothing to write into."""
    assert refused([(WIRE, [])]).endswith("no descriptor came with it")


@pytest.mark.parametrize("at", [1, 3, 4, 5, len(WIRE) - 1])
@pytest.mark.parametrize("early", [[], [5]], ids=["only late", "early too"])
def test_receiver_descriptors_later_than_the_first_byte_are_refused(
    at: int, early: list[int]
) -> None:
    """They belong to the first byte; later ones are not of this message."""
    detail = refused([(WIRE[:at], early), (WIRE[at:], [6])])
    assert detail.endswith("descriptors came later than with the first byte")


def test_receiver_most_descriptors_are_taken_and_one_more_is_refused() -> None:
    """The bound itself is inside."""
    message = ShareReceiver().feed(WIRE, range(MAX_FDS))
    assert message is not None
    assert message.fds == tuple(range(MAX_FDS))
    detail = refused([(WIRE[:1], list(range(MAX_FDS + 1)))])
    assert f"it sent {MAX_FDS + 1} descriptors" in detail


@pytest.mark.parametrize("more", [1, 4, 1000])
def test_receiver_bytes_behind_the_message_are_refused(more: int) -> None:
    """A second message is not swallowed, and no JSON is read beyond its length."""
    assert f"{more} bytes came behind" in refused([(WIRE + b"x" * more, [5])])
    assert f"{more} bytes came behind" in refused([(WIRE[:9], [5]), (WIRE[9:] + b"x" * more, [])])
