"""What lies where in shared memory: what is taken, and that each damage is refused by its name."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebitd.core.share_layout import (
    ALIGNMENT,
    ShareLayout,
    ShareLayoutError,
    ShareTensor,
    parse,
)

CELLS = 256


def tensor(name: str, offset: int, **more: object) -> dict[str, Any]:
    """Return one entry whose rows are 64 bytes: 16384 bytes in all."""
    entry = {"name": name, "type": "f16", "row_size": 64, "region": 0, "offset": offset}
    return entry | more


GOOD: dict[str, Any] = {
    "share_id": 3,
    "layout": 1,
    "n_cells": CELLS,
    "regions": [{"size": 65536}, {"size": 4 * 16384}],
    "tensors": [
        tensor("cache_k_l0", 0),
        tensor("cache_v_l0", 16384),
        tensor("cache_k_l17", 0, region=1, type="q8_0", row_size=68),
        tensor("cache_v_l17", 20480, region=1, swa=True),
    ],
    "model": {"anything": [None]},
}


def read(header: object) -> ShareLayout | None:
    """Parse a header."""
    return parse(json.dumps(header).encode())


def refusal(header: object) -> str:
    """Return why a header is refused."""
    with pytest.raises(ShareLayoutError) as caught:
        read(header)
    return str(caught.value)


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return the good header with one change."""
    header = copy.deepcopy(GOOD)
    change(header)
    return header


def test_parse_good_header_says_what_lies_where() -> None:
    """Every field arrives; keys that are not ours are passed over."""
    assert read(GOOD) == ShareLayout(
        CELLS,
        (65536, 65536),
        (
            ShareTensor("cache_k_l0", 0, "k", "f16", 64, 0, 0),
            ShareTensor("cache_v_l0", 0, "v", "f16", 64, 0, 16384),
            ShareTensor("cache_k_l17", 17, "k", "q8_0", 68, 1, 0),
            ShareTensor("cache_v_l17", 17, "v", "f16", 64, 1, 20480, swa=True),
        ),
    )


@pytest.mark.parametrize("header", [{}, {"share_id": 1}, {"n_cells": 0, "tensors": 5}])
def test_parse_header_without_a_layout_is_none(header: object) -> None:
    """A decoder and its provider may have a language of their own."""
    assert read(header) is None


@pytest.mark.parametrize("header", [[], 1, None, "layout", [{"layout": 1}]])
def test_parse_other_json_is_refused(header: object) -> None:
    """A header is an object."""
    assert refusal(header) == "the header is no JSON object"


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"\xff", b"[" * 200_000, json.dumps(GOOD).encode("utf-16-le")],
    ids=["empty", "cut", "bytes", "deep", "utf16"],
)
def test_parse_bad_json_is_refused(header: bytes) -> None:
    """Never another exception."""
    with pytest.raises(ShareLayoutError, match=r"the header is no JSON$"):
        parse(header)


@pytest.mark.parametrize("version", [0, 2, True, 1.0, "1", None, [], {}])
def test_parse_another_version_is_refused(version: object) -> None:
    """What is not known is not guessed at."""
    assert "is not known, 1 is" in refusal(GOOD | {"layout": version})


NUMBERS = {
    ("n_cells",): 1,
    ("regions", 0, "size"): 1,
    ("tensors", 0, "row_size"): 1,
    ("tensors", 0, "region"): 0,
    ("tensors", 0, "offset"): 0,
}
"""Where numbers stand, and the least that each may be."""


def put(header: dict[str, Any], path: tuple[str | int, ...], value: object) -> None:
    """Set the field at a path."""
    place: Any = header
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value


@pytest.mark.parametrize("path", NUMBERS, ids=lambda path: str(path[-1]))
@pytest.mark.parametrize(
    "value",
    [None, True, False, -1, 1.0, 1e300, "1", [1], {}, 1 << 48, 1 << 64, 10**4000],
    ids=[
        "null", "true", "false", "negative", "float", "large float", "text", "list", "object",
        "48 bits", "64 bits", "4000 digits",
    ],
)  # fmt: skip
def test_parse_number_that_is_none_is_refused_by_its_name(
    path: tuple[str | int, ...], value: object
) -> None:
    """Each number is checked on its own, and the message stays a line."""
    detail = refusal(changed(lambda header: put(header, path, value)))
    assert f"{path[-1]} " in detail
    assert "is no whole number" in detail
    assert len(detail) < 300


@pytest.mark.parametrize("path", NUMBERS, ids=lambda path: str(path[-1]))
def test_parse_number_that_is_missing_or_too_small_is_refused(path: tuple[str | int, ...]) -> None:
    """Nothing has a default."""
    small = changed(lambda header: put(header, path, NUMBERS[path] - 1))
    assert f"from {NUMBERS[path]} to" in refusal(small)

    def remove(header: dict[str, Any]) -> None:
        place: Any = header
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]

    assert f"{path[-1]} None is no" in refusal(changed(remove))


@pytest.mark.parametrize("key", ["regions", "tensors"])
@pytest.mark.parametrize("value", [None, {}, 1, "x", [1], [None], [[]], ["x"]])
def test_parse_list_that_is_none_is_refused(key: str, value: object) -> None:
    """A list of objects and nothing else."""
    assert refusal(GOOD | {key: value}) == f"{key}: is no list of objects"


@pytest.mark.parametrize(
    "name",
    [
        None, 1, [], "", "cache_k_l", "cache_k_l-1", "cache_k_l01", "cache_k_l0 ", "cache_k_l0\n",
        "cache_q_l0", "cache_k_0", "Cache_k_l0", "cache_k_l10000", "cache_k_l\u0660", "x" * 100_000,
        "\ud800",
    ],
)  # fmt: skip
def test_parse_name_of_no_tensor_is_refused(name: object) -> None:
    """Names are llama.cpp's, exactly; however long another is, the message is short."""
    detail = refusal(changed(lambda header: put(header, ("tensors", 0, "name"), name)))
    assert "is not cache_k_l<L> or cache_v_l<L>" in detail
    assert len(detail) < 300
    detail.encode()


@pytest.mark.parametrize("value", [None, 1, "", []])
def test_parse_type_that_is_no_name_is_refused(value: object) -> None:
    """Which types there are is the provider's to know."""
    detail = refusal(changed(lambda header: put(header, ("tensors", 0, "type"), value)))
    assert detail == "tensors[0] (cache_k_l0): type is no name"


@pytest.mark.parametrize("value", [None, 0, 1, "true", []])
def test_parse_swa_that_is_no_truth_value_is_refused(value: object) -> None:
    """A window is there or not."""
    detail = refusal(changed(lambda header: put(header, ("tensors", 0, "swa"), value)))
    assert "is neither true nor false" in detail


def test_parse_region_that_does_not_exist_is_refused() -> None:
    """Every tensor lies in a descriptor that came."""
    detail = refusal(changed(lambda header: put(header, ("tensors", 2, "region"), 2)))
    assert detail == "tensors[2] (cache_k_l17): region 2 of 2"
    assert "region 0 of 0" in refusal(GOOD | {"regions": []})


@pytest.mark.parametrize("offset", [1, 64, 2048, ALIGNMENT + 1, 16384 + 512])
def test_parse_offset_off_the_page_is_refused(offset: int) -> None:
    """Each tensor begins on a page of its own."""
    detail = refusal(changed(lambda header: put(header, ("tensors", 0, "offset"), offset)))
    assert "is no multiple of 4096" in detail


def test_parse_tensor_that_ends_with_its_region_is_taken_and_no_byte_more() -> None:
    """The last row is inside, or the header is refused."""
    place = ("tensors", 1, "offset")
    assert read(changed(lambda header: put(header, place, 65536 - 16384))) is not None
    assert "do not fit" in refusal(changed(lambda header: put(header, place, 65536 - 12288)))
    assert "do not fit" in refusal(changed(lambda header: put(header, place, 1 << 40)))
    assert "do not fit" in refusal(
        changed(lambda header: put(header, ("regions", 1, "size"), 20480 + 16383))
    )
    assert "do not fit" in refusal(GOOD | {"n_cells": (1 << 48) - 1})


def test_parse_tensors_that_overlap_are_refused() -> None:
    """By a row or wholly; in two regions the same place is two places."""
    place = ("tensors", 1, "offset")
    assert refusal(changed(lambda header: put(header, place, 12288))) == (
        "tensors: cache_k_l0 and cache_v_l0 overlap"
    )
    assert "overlap" in refusal(changed(lambda header: put(header, place, 0)))
    moved = changed(lambda header: put(header, ("tensors", 3, "region"), 0))
    assert refusal(moved) == "tensors: cache_v_l0 and cache_v_l17 overlap"
    put(moved, ("tensors", 3, "offset"), 32768)
    assert read(moved) is not None
    wide = changed(lambda header: put(header, ("tensors", 0, "row_size"), 66))
    assert "overlap" in refusal(wide)


def test_parse_name_twice_is_refused() -> None:
    """One place for each tensor."""
    detail = refusal(changed(lambda header: put(header, ("tensors", 1, "name"), "cache_k_l0")))
    assert detail == "tensors: a name stands there twice"


def test_parse_no_tensor_is_refused() -> None:
    """A layout of nothing would let a provider that wrote nothing succeed."""
    assert refusal(GOOD | {"tensors": []}) == "tensors: there is none"


@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.integers(0, 40), st.integers(0, 1)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 64),
)
def test_parse_what_is_taken_never_overlaps_and_never_leaves_its_region(
    places: list[tuple[int, int, int]], n_cells: int
) -> None:
    """The promise that lets a provider write without looking again."""
    sizes = [120_000, 40_000]
    header = {
        "layout": 1,
        "n_cells": n_cells,
        "regions": [{"size": size} for size in sizes],
        "tensors": [
            tensor(
                f"cache_k_l{index}", page * ALIGNMENT, type="q8_0", row_size=row_size, region=region
            )
            for index, (row_size, page, region) in enumerate(places)
        ],
    }
    taken = [(region, page * ALIGNMENT, row_size * n_cells) for row_size, page, region in places]
    fits = all(start + size <= sizes[region] for region, start, size in taken)
    apart = all(
        one[0] != two[0] or one[1] + one[2] <= two[1] or two[1] + two[2] <= one[1]
        for index, one in enumerate(taken)
        for two in taken[:index]
    )
    if fits and apart:
        assert read(header) is not None
    else:
        refusal(header)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted(GOOD)), values)
def test_parse_any_value_anywhere_is_taken_or_refused(key: str, value: object) -> None:
    """Never another exception."""
    with contextlib.suppress(ShareLayoutError):
        read(GOOD | {key: value})
