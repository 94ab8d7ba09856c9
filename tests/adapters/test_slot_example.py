"""The state file of the running decoder's own, kept in the slot directory for providers."""

from __future__ import annotations

import shutil
from pathlib import Path

from onebitd.adapters.slot_files import SlotFiles


def test_example_is_the_last_one_kept_for_us_alone(tmp_path: Path) -> None:
    """Each decoder's replaces the one before; mode 0600 whatever llama-server's umask was."""
    slots = SlotFiles(tmp_path / "slots")
    assert slots.example() is None
    for data in (b"first decoder's", b"second decoder's"):
        name = slots.new_name()
        (slots.path / name).write_bytes(data)
        (slots.path / name).chmod(0o644)
        slots.keep_example(name)
        found = slots.example()
        assert found == str(slots.path / "example.state")
        assert Path(found).read_bytes() == data
        assert Path(found).stat().st_mode & 0o777 == 0o600
        assert [path.name for path in slots.path.iterdir()] == ["example.state"]
    slots.drop_example()
    assert slots.example() is None
    slots.drop_example()


def test_example_that_cannot_be_kept_is_none_and_no_error(tmp_path: Path) -> None:
    """A directory that somebody removed costs the example, not the decoder."""
    slots = SlotFiles(tmp_path / "slots")
    slots.path.rmdir()
    slots.keep_example("state-gone")
    assert slots.example() is None


def test_example_that_somebody_removed_is_there_again(tmp_path: Path) -> None:
    """The decoder saves it at its start only, and a provider without it guesses."""
    slots = SlotFiles(tmp_path / "slots")
    (slots.path / "state-1").write_bytes(b"the decoder's")
    slots.keep_example("state-1")
    shutil.rmtree(slots.path)
    found = slots.example()
    assert found is not None
    assert Path(found).read_bytes() == b"the decoder's"
    assert Path(found).stat().st_mode & 0o777 == 0o600
    slots.drop_example()
    assert slots.example() is None


def test_example_of_an_earlier_daemon_is_swept(tmp_path: Path) -> None:
    """It speaks of a decoder that is gone."""
    slots = SlotFiles(tmp_path / "slots")
    (slots.path / "example.state").touch()
    assert slots.sweep() == 1
    assert list(slots.path.iterdir()) == []
