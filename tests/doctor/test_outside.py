"""What is seen from outside, held against what was found inside, or by whoever asks."""

from __future__ import annotations

import pytest

from onebitd.client import AccessDenied, AnswerTimeout, NoDaemon
from onebitd.core.errors import OnebitError
from onebitd.doctor import daemon, devices, outside
from onebitd.doctor.devices import Node
from onebitd.doctor.finding import Finding, State, failed, ok, warning
from onebitd.doctor.place import Place

INSIDE = Place("q", "system", inside=True, is_root=True)
CALLER = Place("q", "system")
NODES = [
    Node(path, kind, uid=0, gid=44, mode=0o660, can_open=True)
    for path, kind in (("/dev/accel/accel0", "accel"), ("/dev/dri/renderD128", "drm"))
]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NPU and a GPU are there."""
    monkeypatch.setattr(devices, "read_nodes", lambda: NODES)


@pytest.mark.parametrize(
    ("seen", "place", "hidden"),
    [
        ([], INSIDE, ["device.accel0", "device.renderD128"]),
        (["/dev/dri/renderD128"], INSIDE, ["device.accel0"]),
        ([one.path for one in NODES], INSIDE, []),
        ([], CALLER, []),
    ],
)
@pytest.mark.usefixtures("nodes")
def test_amended_says_which_nodes_the_sandbox_hides(
    seen: list[str], place: Place, hidden: list[str]
) -> None:
    """And then it is not true that there is only the CPU, as the checks inside believe."""
    cpu = ok(devices.NO_NODES, "there is only the CPU")
    found = outside.amended([cpu], {"nodes": seen}, place, for_service=True)
    assert [one.name for one in found if one.state is State.FAILED] == hidden
    assert all("PrivateDevices=no" in (one.fix or "") for one in found if one is not cpu)
    assert (cpu in found) == (not hidden)


SHUT = failed("model.file", "the model /m lets the user ann not in", "sudo chmod o+x /m")


@pytest.mark.parametrize(
    ("one", "denied"),
    [
        (SHUT, {"model.file": "/m"}),
        (failed("device.accel0", "it is closed to the user ann", "usermod"), {}),
        (failed("device.accel0", "it is kept from us"), {}),
        (warning("device.memlock", "8 MiB of memory may be locked", "prlimit"), {}),
    ],
)
def test_amended_does_not_take_the_caller_for_the_service(
    one: Finding, denied: dict[str, str]
) -> None:
    """What is closed to a member of the group may be open to the service: root can tell."""
    (found,) = outside.amended([one], {"denied": denied}, CALLER, for_service=True)
    assert found.state is State.WARNING
    assert found.fix == "sudo onebitctl -i q doctor"


@pytest.mark.parametrize(
    ("one", "place", "for_service"),
    [
        (SHUT, CALLER, False),  # --here, or no service
        (SHUT, INSIDE, True),
        (SHUT, Place("q", "user"), True),  # whose service runs as the caller
        (SHUT, Place("q", "system", is_root=True), True),  # a masked one
        (failed("model.header", "it is no GGUF", "vi"), CALLER, True),
        (ok("device.accel0", "/dev/accel/accel0"), CALLER, True),
    ],
)
def test_amended_leaves_what_is_true_for_the_service(
    one: Finding, place: Place, for_service: bool
) -> None:
    """A fault that does not depend on who asks stays one."""
    facts = {"denied": {"model.file": "/m"}}
    assert outside.amended([one], facts, place, for_service=for_service) == [one]


@pytest.mark.parametrize(
    ("why", "state"),
    [
        (None, State.SKIPPED),
        (NoDaemon("nobody listens"), State.SKIPPED),
        (AccessDenied("it is for the group onebitd"), State.SKIPPED),
        (AnswerTimeout("it does not answer"), State.FAILED),
    ],
)
def test_daemon_that_does_not_answer_has_failed(why: OnebitError | None, state: State) -> None:
    """One that is not there, or not ours to ask, has not."""
    (found,) = daemon.judge(None, why, INSIDE)
    assert found.state is state
    assert (found.fix == "systemctl restart onebitd@q.service") == (state is State.FAILED)
