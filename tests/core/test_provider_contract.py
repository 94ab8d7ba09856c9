"""The provider contract: argv, environment, ids file, result line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebitd.core import provider_contract as contract


def test_file_route_argv_is_the_contract() -> None:
    """Every flag of the file route, --elfs only when it is set."""
    argv = contract.file_route_argv("/p", tokens_file="/t", state_file="/o", model="/m", elfs=None)
    assert argv == ["/p", "--tokens", "/t", "--out", "/o", "--model", "/m"]
    with_elfs = contract.file_route_argv(
        "/p", tokens_file="/t", state_file="/o", model="/m", elfs="/e"
    )
    assert with_elfs == [*argv, "--elfs", "/e"]


def test_environment_lock_variable_only_while_we_hold_it() -> None:
    """The engine must take the lock itself when we do not have it."""
    held = contract.environment({"A": "1"}, {"B": "2"}, lock_held=True, llama_server="/ls")
    assert held == {
        "A": "1",
        "B": "2",
        "NPU_NO_DEVICE_LOCK": "1",
        "ONEBIT_LLAMA_SERVER": "/ls",
    }
    assert "NPU_NO_DEVICE_LOCK" not in contract.environment(
        {}, {}, lock_held=False, llama_server="/ls"
    )


def test_environment_llama_server_is_the_decoders_unless_provider_env_names_one() -> None:
    """The program that flag, variable and file were resolved to; `provider.env` stands above it."""
    inherited = {"ONEBIT_LLAMA_SERVER": "/exported"}
    env = contract.environment(inherited, {}, lock_held=False, llama_server="/resolved")
    assert env["ONEBIT_LLAMA_SERVER"] == "/resolved"
    own = {"ONEBIT_LLAMA_SERVER": "/mine"}
    env = contract.environment(inherited, own, lock_held=False, llama_server="/resolved")
    assert env["ONEBIT_LLAMA_SERVER"] == "/mine"


def test_environment_state_example_is_the_running_decoders_or_none() -> None:
    """A variable exported to the daemon speaks of some other decoder, and is not passed on."""
    inherited = {"ONEBIT_STATE_EXAMPLE": "/exported"}
    env = contract.environment(inherited, {}, lock_held=False, llama_server="/ls")
    assert "ONEBIT_STATE_EXAMPLE" not in env
    for extra, expected in (({}, "/kept"), ({"ONEBIT_STATE_EXAMPLE": "/mine"}, "/mine")):
        env = contract.environment(
            inherited, extra, lock_held=False, llama_server="/ls", state_example="/kept"
        )
        assert env["ONEBIT_STATE_EXAMPLE"] == expected


def test_format_tokens_one_decimal_a_line() -> None:
    """As the contract says."""
    assert contract.format_tokens([1, 22, 333]) == b"1\n22\n333\n"


@pytest.mark.parametrize(
    ("stdout", "expected"),
    [
        (b'loading\n{"prefill_ms": 88.1}\n', 88.1),
        (b'{"prefill_ms": 5}', 5.0),
        (b'{"prefill_ms": 88.1}\nbye\n', None),
        (b'{"prefill_ms": "88"}', None),
        (b'{"prefill_ms": true}', None),
        (b'{"prefill_ms": -1}', None),
        (b'{"prefill_ms": NaN}', None),
        (b'{"prefill_ms": 1e400}', None),
        (b"[]", None),
        (b"", None),
        (b"\xff", None),
    ],
)
def test_reported_prefill_ms_only_a_number_on_the_last_line(
    stdout: bytes, expected: float | None
) -> None:
    """The provider's own figure, or nothing."""
    assert contract.reported_prefill_ms(stdout) == expected


@given(st.binary(max_size=300))
def test_last_line_any_output_is_one_printable_line(stderr: bytes) -> None:
    """Whatever a provider prints, the detail is one line of bounded length."""
    line = contract.last_line(stderr)
    assert len(line) <= 300
    assert line.isprintable()
    assert "\n" not in line


def test_last_line_blank_lines_behind_are_passed_over() -> None:
    """The last line that says something."""
    assert contract.last_line(b"first\nno XDNA device\x1b[0m\n  \n\n") == "no XDNA device [0m"
