"""The list of a GGUF's tensors: agreement with the gguf package, and damaged lists."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebitd.core.gguf_header import GgufError, read_metadata
from onebitd.core.gguf_tensors import read_tensors
from tests.tiny_models import TINY_MODELS, write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's file."""
    return write(TINY_MODELS[0], tmp_path_factory.mktemp("tiny")).path


def test_read_tensors_finds_what_the_gguf_package_finds(model: Path) -> None:
    """Names in order, shapes, types and places."""
    data = model.read_bytes()
    found = read_tensors(data, read_metadata(data))
    expected = gguf.GGUFReader(model).tensors
    assert list(found) == [tensor.name for tensor in expected]
    for tensor in expected:
        ours = found[tensor.name]
        assert ours.shape == tuple(int(size) for size in tensor.shape)
        assert (ours.type, ours.offset) == (tensor.tensor_type, tensor.data_offset)


@given(st.data())
def test_read_tensors_of_damaged_bytes_ends_in_a_gguf_error(
    model: Path, data: st.DataObject
) -> None:
    """Cut or changed anywhere, it is a list or a GgufError, and nothing else."""
    start = model.read_bytes()[:16384]
    metadata = read_metadata(start)
    cut = data.draw(st.integers(metadata.end, len(start)))
    spoiled = bytearray(start[:cut])
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)))):
        if metadata.end + at < cut:
            spoiled[metadata.end + at] = value
    try:
        found = read_tensors(bytes(spoiled), metadata)
    except GgufError:
        return
    assert len(found) <= metadata.n_tensors


def test_read_tensors_cut_list_says_so(model: Path) -> None:
    """A file that ends within its list is told as cut."""
    data = model.read_bytes()
    metadata = read_metadata(data)
    with pytest.raises(GgufError, match="do not fit"):
        read_tensors(data[: metadata.end + 40], metadata)
    with pytest.raises(GgufError, match="is cut"):
        read_tensors(data[: metadata.end + 32 * metadata.n_tensors], metadata)
