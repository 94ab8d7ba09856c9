"""The GGUF metadata reader: what it finds, what it refuses, and that it always ends."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebitd.core.gguf_header import GgufError, GgufHeader, read

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
LETTERS = {U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q"}


def string(text: str) -> bytes:
    """Return a GGUF string."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, type_: int, value: float | str) -> bytes:
    """Return one metadata pair with a single value."""
    head = string(key) + struct.pack("<I", type_)
    if isinstance(value, str):
        return head + string(value)
    return head + struct.pack(f"<{LETTERS[type_]}", value)


def array(key: str, type_: int, values: Sequence[int | str]) -> bytes:
    """Return one metadata pair with an array."""
    head = string(key) + struct.pack("<IIQ", ARRAY, type_, len(values))
    return head + b"".join(
        string(value) if isinstance(value, str) else struct.pack(f"<{LETTERS[type_]}", value)
        for value in values
    )


def gguf(*pairs: bytes, version: int = 3, n_pairs: int | None = None) -> bytes:
    """Return a GGUF with this metadata and no tensors, then some bytes of them."""
    count = len(pairs) if n_pairs is None else n_pairs
    return b"GGUF" + struct.pack("<IQQ", version, 0, count) + b"".join(pairs) + bytes(64)


def arch(name: str) -> bytes:
    """Return the pair that names the architecture."""
    return pair("general.architecture", STRING, name)


GEMMA = gguf(
    arch("gemma3"),
    pair("general.name", STRING, "Gemma tiny"),
    array("general.tags", STRING, ["a", "b"]),
    pair("gemma3.block_count", U32, 18),
    pair("gemma3.context_length", U32, 32768),
    pair("gemma3.attention.layer_norm_rms_epsilon", F32, 1e-6),
    pair("gemma3.attention.sliding_window", U32, 512),
    pair("gemma3.nextn_predict_layers", U32, 1),
    array("tokenizer.ggml.tokens", STRING, ["<pad>", "", "ё"] * 100),
    array("tokenizer.ggml.token_type", I32, [1] * 300),
    pair("tokenizer.ggml.add_bos_token", BOOL, value=True),
)


def test_read_whole_metadata_finds_what_the_daemon_needs() -> None:
    """Names, depth, window, vocabulary and head are read; arrays in between are passed over."""
    assert read(GEMMA) == GgufHeader(
        version=3,
        architecture="gemma3",
        name="Gemma tiny",
        block_count=18,
        context_length=32768,
        sliding_window=512,
        is_recurrent=False,
        is_hybrid=False,
        n_vocab=300,
        nextn_predict_layers=1,
    )


def test_read_metadata_that_says_little_leaves_the_rest_open() -> None:
    """Only the architecture is required; version 2 is read too."""
    header = read(gguf(arch("llama"), version=2))
    assert header == GgufHeader(2, "llama", None, None, None, None, False, False, None, 0)


@pytest.mark.parametrize(
    ("pairs", "window"),
    [
        ([arch("x"), array("x.attention.sliding_window", U32, [0, 128, 0, 1024])], 1024),
        ([arch("x"), array("x.attention.sliding_window", I32, [0, 0])], None),
        ([arch("x"), pair("x.attention.sliding_window", U32, 0)], None),
        ([arch("x"), pair("x.attention.sliding_window", I32, -1)], None),
        ([arch("x"), pair("y.attention.sliding_window", U32, 9)], None),
        ([arch("gemma2")], 4096),
        ([arch("gemma2"), pair("gemma2.attention.sliding_window", U32, 99)], 99),
        ([arch("llama4"), pair("llama4.attention.sliding_window", U32, 0)], None),
    ],
)
def test_read_sliding_window_is_the_largest_positive_one(
    pairs: list[bytes], window: int | None
) -> None:
    """A window may differ by layer, be switched off by 0, or be supplied by llama.cpp."""
    assert read(gguf(*pairs)).sliding_window == window


@pytest.mark.parametrize(
    ("name", "key", "kind"),
    [
        ("mamba", "mamba.ssm.conv_kernel", "recurrent"),
        ("rwkv7", "rwkv7.wkv.head_size", "recurrent"),
        ("lfm2", "lfm2.shortconv.l_cache", "hybrid"),
        ("qwen35", "qwen35.ssm.state_size", "hybrid"),
        ("llama", "other.ssm.state_size", ""),
        ("llama", "llama.ssmall", ""),
    ],
)
def test_read_memory_kind_follows_keys_and_architecture(name: str, key: str, kind: str) -> None:
    """A recurrent part shows in the model's own keys; some architectures have nothing else."""
    header = read(gguf(arch(name), pair(key, U32, 4)))
    assert (header.is_recurrent, header.is_hybrid) == (kind == "recurrent", kind == "hybrid")


WIDTH, HEADS = pair("x.embedding_length", U32, 576), pair("x.attention.head_count", U32, 9)
LONG, WINDOW = "x.attention.key_length", "x.attention.key_length_swa"


@pytest.mark.parametrize(
    ("pairs", "head_dim"),
    [
        ([WIDTH, HEADS], 64),
        ([WIDTH, HEADS, pair(LONG, U32, 256)], 256),
        ([pair(LONG, U32, 128), pair(WINDOW, U32, 128)], 128),
        ([pair(LONG, U32, 128), pair(WINDOW, U32, 64)], None),
        ([WIDTH, array("x.attention.head_count", U32, [8, 9])], None),
        ([WIDTH, pair("x.attention.head_count", U32, 0)], None),
        ([HEADS], None),
        ([], None),
    ],
)
def test_read_head_dim_is_the_keys_length_or_the_width_of_one_head(
    pairs: list[bytes], head_dim: int | None
) -> None:
    """Where layers differ there is no one answer."""
    assert read(gguf(arch("x"), *pairs)).head_dim == head_dim


REFUSED = [
    (b"", "not a GGUF file: starts with b'', not b'GGUF'"),
    (b"qsgg" + bytes(40), "not a GGUF file: starts with b'qsgg'"),
    (gguf(arch("x"), version=1), "GGUF version 1 cannot be read: 2 and 3 are known"),
    (b"GGUF\0\0\0\3" + bytes(40), "cannot be read: it is big-endian"),
    (gguf(), "the metadata has no general.architecture"),
    (gguf(pair("general.architecture", U32, 3)), "the metadata has no general.architecture"),
    (gguf(arch("x"), n_pairs=1 << 60), "metadata pairs do not fit"),
    (gguf(string("k") + struct.pack("<I", 77)), "k: value type 77 is not known"),
    (gguf(string("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1)), "k: value type 9 is not known"),
    (gguf(string("k") + struct.pack("<IIQ", ARRAY, U32, 1 << 62)), "the metadata is cut: k at"),
    (gguf(string("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 62)), "strings do not fit"),
    (gguf(struct.pack("<Q", 1 << 63) + bytes(20)), "the metadata is cut: a metadata key at byte"),
    (GEMMA[:500], "tokenizer.ggml.tokens: "),
]


@pytest.mark.parametrize(("data", "sentence"), REFUSED)
def test_read_what_is_no_gguf_is_refused_by_name(data: bytes, sentence: str) -> None:
    """The message says what is wrong with the file, and where."""
    with pytest.raises(GgufError) as caught:
        read(data)
    assert sentence in str(caught.value)


def test_read_truncated_anywhere_is_refused() -> None:
    """A file that ends within its metadata is never half read."""
    for length in range(len(GEMMA) - 64):
        with pytest.raises(GgufError) as caught:
            read(GEMMA[:length])
        assert length < 8 or "cut off or damaged, fetch it again" in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_read_damaged_metadata_raises_nothing_but_gguf_error(data: st.DataObject) -> None:
    """Whatever bytes are set: a header, or a GgufError."""
    whole = bytearray(GEMMA)
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(4, len(whole) - 8))
        width = data.draw(st.sampled_from([1, 4, 8]))
        whole[at : at + width] = data.draw(st.binary(min_size=width, max_size=width))
    try:
        read(bytes(whole))
    except GgufError:
        return


@given(junk=st.binary(max_size=200))
def test_read_random_bytes_raise_nothing_but_gguf_error(junk: bytes) -> None:
    """Random metadata is refused, or happens to say something."""
    for data in (junk, b"GGUF" + junk, gguf(junk)):
        try:
            read(data)
        except GgufError:
            continue


def test_read_mmap_can_be_closed_after_a_refusal(tmp_path: Path) -> None:
    """No view of the map outlives the call."""
    path = tmp_path / "model.gguf"
    path.write_bytes(GEMMA[:500])
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        with pytest.raises(GgufError, match=r"tokenizer\.ggml\.tokens") as caught:
            read(view)
        view.close()
        assert view.closed
        assert caught.tb is not None  # the frames of the refusal are still alive
