"""The report: its order, its summary, its page, its commands."""

from __future__ import annotations

import shlex

import pytest

from onebitd.doctor import finding, page, place
from onebitd.doctor.finding import BadReport, Finding, State, failed, ok, skipped, warning
from onebitd.doctor.place import Place

MIXED = [
    ok("config", "/etc/onebitd/q.toml is fine"),
    failed("port", "127.0.0.1:8000 is taken by pid 7 (nginx)", "kill 7"),
    warning("lock", "it is odd", "first \\\n  second"),
    skipped("daemon", "it does not run"),
    failed("model.file", "there is none"),
]


@pytest.mark.parametrize(
    ("found", "status"),
    [([], 0), ([ok("config", "")], 0), ([warning("lock", "")], 0), (MIXED, 1)],
)
def test_exit_status_is_one_only_when_a_check_has_failed(found: list[Finding], status: int) -> None:
    """Warnings leave it at 0."""
    assert finding.exit_status(found) == status


def test_summary_counts_the_worst_first() -> None:
    """Failed ones, then warnings, each by name; what was skipped as a number."""
    assert finding.summary(MIXED) == (
        "2 of 4 checks failed: port, model.file; 1 warning: lock, 1 skipped"
    )


def test_from_json_gives_back_what_to_json_made() -> None:
    """The report of the checks inside arrives as it was."""
    assert [finding.from_json(one.to_json()) for one in MIXED] == MIXED


@pytest.mark.parametrize(
    "found", [None, [], {}, {"name": "x", "message": "y", "state": "fine"}, {"state": "ok"}]
)
def test_from_json_of_something_else_is_refused(found: object) -> None:
    """Whoever runs inside the service is not believed."""
    with pytest.raises(BadReport):
        finding.from_json(found)


def test_page_groups_the_checks_with_a_mark_each() -> None:
    """The place, the summary, and each group under its heading; a fix is as a shell takes it."""
    assert page.page("q: checked here", MIXED, colour=False).splitlines() == [
        "q: checked here",
        "2 of 4 checks failed: port, model.file; 1 warning: lock, 1 skipped",
        "",
        "configuration",
        "  ok /etc/onebitd/q.toml is fine",
        "model",
        "  x  there is none",
        "device lock",
        "  !  it is odd",
        "       first \\",
        "         second",
        "HTTP port",
        "  x  127.0.0.1:8000 is taken by pid 7 (nginx)",
        "       kill 7",
        "daemon",
        "  -  it does not run",
    ]


def test_page_fits_80_columns_and_keeps_control_characters_out() -> None:
    """However long a sentence is, and whatever another program has said."""
    text = page.page("q", [failed("provider.run", "\x1b[2J" + "word " * 60)], colour=False)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


def test_page_colour_paints_the_marks() -> None:
    """Red for what has failed; without colour there is none."""
    assert "\x1b[31mx\x1b[0m" in page.page("q", MIXED, colour=True)
    assert "\x1b" not in page.page("q", MIXED, colour=False)


def test_place_drop_in_is_a_command_that_a_shell_takes() -> None:
    """The lines reach the file as they are, and every line of the command is short."""
    here = Place("qwen", "system", inside=True)
    text = here.drop_in("see", "BindReadOnlyPaths=/srv/my models")
    joined = text.replace("\\\n", " ")
    words = shlex.split(joined.splitlines()[0])
    assert words[2:4] == ["[Service]", "BindReadOnlyPaths=/srv/my models"]
    assert "/etc/systemd/system/onebitd@qwen.service.d/zz-see.conf" in joined
    assert "sudo systemctl daemon-reload" in joined
    assert max(map(len, text.splitlines())) <= 73


def test_place_of_a_user_has_no_sudo() -> None:
    """A user's manager is the user's own; root needs none either."""
    assert "sudo" not in Place("q", "user").drop_in("x", "A=b")
    assert "~/.config/systemd/user/" in Place("q", "user").drop_in("x", "A=b")
    assert "sudo" not in Place("q", "system", is_root=True).drop_in("x", "A=b")


def test_place_from_json_gives_back_what_to_json_made() -> None:
    """The request for the checks inside says where they are."""
    here = Place("q", "user", inside=True, is_root=True, config_file="/x")
    assert place.from_json(here.to_json()) == here


def test_states_are_the_words_of_the_json() -> None:
    """Names are promises."""
    assert [state.value for state in State] == ["ok", "warning", "failed", "skipped"]
