"""What the public listener and the control socket may be, on real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from onebitd.adapters import listeners
from onebitd.adapters.systemd import ServiceManager
from onebitd.core.config import Config
from onebitd.core.config_resolve import resolve
from onebitd.core.errors import ConfigError, InstanceTaken
from onebitd.surfaces.listening import admit_to_control, open_listeners


@dataclasses.dataclass
class Passed:
    """A service manager that passes these sockets."""

    sockets: dict[str, list[socket.socket]]
    present: bool = True

    def listen_fds(self) -> dict[str, list[int]]:
        """Return their descriptors by name."""
        return {name: [one.fileno() for one in some] for name, some in self.sockets.items()}


def config_of(**http: Any) -> Config:
    """Return a configuration whose public port is free."""
    http = {"host": "127.0.0.1", "port": 0, **http}
    return resolve(instance="test", file={"model": {"path": "/m.gguf"}, "http": http})


def opened(config: Config, runtime: Path, **sockets: socket.socket) -> list[str]:
    """Open all listeners, close them again, and return the public addresses."""
    manager = Passed({name: [one] for name, one in sockets.items()})
    found = open_listeners(config, cast("ServiceManager", manager), runtime)
    for one in (*found.public, *found.control):
        one.close()
    return list(found.addresses)


@contextlib.contextmanager
def bound(family: int, address: Any) -> Iterator[socket.socket]:
    """Yield a listening socket; skips the test where the machine has no such address."""
    with socket.socket(family) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            pytest.skip(f"no socket on {address}: {error.strerror}")
        listener.listen()
        yield listener


@pytest.mark.parametrize(
    ("family", "address"),
    [
        (socket.AF_INET, ("0.0.0.0", 0)),  # noqa: S104 - nobody is served
        (socket.AF_INET6, ("::", 0)),
        (socket.AF_INET6, ("::ffff:0.0.0.0", 0)),
    ],
)
def test_open_listeners_passed_socket_for_everybody_needs_keys(
    tmp_path: Path, family: int, address: tuple[str, int]
) -> None:
    """Whatever http.host says; with keys, or the word that none are wanted, it is served."""
    with bound(family, address) as public:
        with pytest.raises(ConfigError, match=r"api_key_file: required because the socket"):
            opened(config_of(), tmp_path, http=public)
        assert not (tmp_path / "control.sock").exists()
        assert opened(config_of(allow_unauthenticated=True), tmp_path, http=public)
        assert opened(config_of(api_key_file="/keys"), tmp_path, http=public)


@pytest.mark.parametrize("address", [("127.0.0.1", 0), ("127.8.9.1", 0)])
def test_open_listeners_passed_socket_on_loopback_needs_none(
    tmp_path: Path, address: tuple[str, int]
) -> None:
    """Nobody reaches it from elsewhere."""
    with bound(socket.AF_INET, address) as public:
        assert opened(config_of(), tmp_path, http=public)


def test_open_listeners_localhost_that_is_none_needs_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is what the name has become, /etc/hosts says strange things; nothing is left."""
    made: list[socket.socket] = []

    def everywhere(host: str, port: int, backlog: int) -> list[socket.socket]:
        assert host == "app.localhost"
        made.append(socket.create_server(("0.0.0.0", port), backlog=backlog))  # noqa: S104
        return made

    monkeypatch.setattr(listeners, "open_tcp", everywhere)
    with pytest.raises(ConfigError, match=r"because http\.host app\.localhost, 0\.0\.0\.0:\d+, is"):
        opened(config_of(host="app.localhost"), tmp_path)
    assert made[0].fileno() == -1


def test_open_listeners_control_socket_on_tcp_is_refused(tmp_path: Path) -> None:
    """There, the kernel does not say who asks: everybody could administer the daemon."""
    with (
        bound(socket.AF_INET, ("127.0.0.1", 0)) as control,
        pytest.raises(ConfigError, match="no Unix socket"),
    ):
        opened(config_of(), tmp_path, control=control)


def test_admit_to_control_serves_us_and_no_stranger(tmp_path: Path) -> None:
    """One's own user is served; a socket that tells nobody apart is refused."""
    with bound(socket.AF_UNIX, str(tmp_path / "s")) as listener:
        admit = admit_to_control([listener])
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(listener.getsockname())
            accepted, _ = listener.accept()
            with accepted:
                assert admit(accepted) is None
    with (
        bound(socket.AF_INET, ("127.0.0.1", 0)) as tcp,
        socket.create_connection(tcp.getsockname()) as client,
    ):
        refused = admit(client)
    assert refused is not None
    assert (refused.status, refused.kind) == (403, "permission_error")


def config_with_metrics(listen: str) -> Config:
    """Return a configuration whose public port is free, and a listener for scrapers."""
    file = {"model": {"path": "/m.gguf"}, "http": {"port": 0}, "metrics": {"listen": listen}}
    return resolve(instance="test", file=file)


@pytest.mark.parametrize(("listen", "host"), [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "[::1]")])
def test_open_listeners_metrics_are_where_they_are_wanted(
    tmp_path: Path, listen: str, host: str
) -> None:
    """One listener more, on its own address, of either family; keys are not asked for."""
    if host == "[::1]":
        with bound(socket.AF_INET6, ("::1", 0)):
            pass
    found = open_listeners(
        config_with_metrics(listen), cast("ServiceManager", Passed({})), tmp_path
    )
    with contextlib.ExitStack() as stack:
        for one in (*found.public, *found.control, *found.metrics):
            stack.enter_context(one)
        (listener,) = found.metrics
        (address,) = found.metrics_addresses
        assert address == f"{host}:{listener.getsockname()[1]}"
        assert not listener.get_inheritable()
        assert address not in found.addresses


def test_open_listeners_metrics_none_without_the_key(tmp_path: Path) -> None:
    """Off by default."""
    found = open_listeners(config_of(), cast("ServiceManager", Passed({})), tmp_path)
    for one in (*found.public, *found.control):
        one.close()
    assert (found.metrics, found.metrics_addresses) == ([], [])


def test_open_listeners_metrics_port_that_is_taken_leaves_nothing_open(tmp_path: Path) -> None:
    """The line names port, address and key; the public listener is closed again."""
    with bound(socket.AF_INET, ("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        before = sorted(os.listdir("/proc/self/fd"))
        with pytest.raises(InstanceTaken) as caught:
            opened(config_with_metrics(f"127.0.0.1:{port}"), tmp_path)
        assert sorted(os.listdir("/proc/self/fd")) == before
    assert str(caught.value).startswith(f"port {port} on 127.0.0.1 is taken by pid {os.getpid()}")
    assert str(caught.value).endswith("choose another port with metrics.listen")
    assert not (tmp_path / "control.sock").exists()


def test_open_listeners_metrics_address_that_is_not_here_names_its_key(tmp_path: Path) -> None:
    """Not http.host, which is fine."""
    with pytest.raises(ConfigError, match=r"^metrics\.listen: cannot listen on 192\.0\.2\.1"):
        opened(config_with_metrics("192.0.2.1:9464"), tmp_path)
