"""http.max_connections, from the file to the socket."""

from __future__ import annotations

import json
from contextlib import ExitStack

from tests.e2e.test_reload import reloading
from tests.harness import raw_connection


def test_daemon_holds_clients_to_max_connections_and_a_reload_changes_it() -> None:
    """A 503 that names the setting; one more is served when it is raised."""
    config = "[http]\nmax_connections = 2\n"
    with reloading(provider=False, config=config) as daemon, ExitStack() as stack:
        for _ in range(2):  # requests that have begun make no room
            opened = stack.enter_context(raw_connection(daemon.daemon.port))
            opened.sendall(b"GET /health HT")
        reply = daemon.daemon.request("GET", "/health")
        assert (reply.status, reply.headers["retry-after"]) == (503, "5")
        assert "http.max_connections" in json.loads(reply.body)["error"]["message"]
        daemon.write(("max_connections = 2", "max_connections = 3"))
        assert daemon.reload() == ["http.max_connections"]
        assert daemon.daemon.request("GET", "/health").status == 200
