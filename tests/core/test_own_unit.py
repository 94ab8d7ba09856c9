"""The daemon's own unit, read from its control group."""

from __future__ import annotations

import pytest

from onebitd.core.own_unit import OwnUnit, unit_in

SYSTEM = OwnUnit("onebitd@qwen.service", of_user=False)
USER = OwnUnit("onebitd@qwen.service", of_user=True)
SLICE = "/system.slice/system-onebitd.slice"
MANAGER = "/user.slice/user-7.slice/user@7.service"


@pytest.mark.parametrize(
    ("cgroup", "wanted"),
    [
        (f"0::{SLICE}/onebitd@qwen.service\n", SYSTEM),
        (f"0::{MANAGER}/app.slice/app-onebitd.slice/onebitd@qwen.service\n", USER),
        # Whatever the service makes below itself, and a machine with the old hierarchy.
        (f"0::{SLICE}/onebitd@qwen.service/daemon\n", SYSTEM),
        (f"12:cpu:/\n1:name=systemd:{SLICE}/onebitd@qwen.service\n", SYSTEM),
        # A terminal, of a desktop and of a login; the user's manager itself; a container.
        (f"0::{MANAGER}/app.slice/terminal-1.scope\n", None),
        ("0::/user.slice/user-7.slice/session-3.scope\n", None),
        (f"0::{MANAGER}/init.scope\n", None),
        (f"0::{MANAGER}\n", None),
        ("0::/\n", None),
        ("", None),
        ("nonsense", None),
    ],
)
def test_unit_in_a_control_group_is_the_service_and_whose_it_is(
    cgroup: str, wanted: OwnUnit | None
) -> None:
    """So that a message can name the command that shows its log."""
    assert unit_in(cgroup) == wanted
