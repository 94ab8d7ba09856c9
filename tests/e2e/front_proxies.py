"""Runs the shipped nginx and HAProxy configurations, unprivileged, on addresses of a test."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.harness import HttpReply, wait_until
from tests.llama_builds import ROOT, require_program

NOBODY = 65534
SHIPPED = {"nginx": ROOT / "etc/nginx-onebitd.conf", "haproxy": ROOT / "etc/haproxy-onebitd.cfg"}

# What the system's own main file gives them on Debian, with all paths below one directory.
_NGINX_MAIN = """
daemon off;
worker_processes 2;
pid {home}/pid;
error_log {home}/error.log;
events {{}}
http {{
    access_log {home}/access.log;
    client_body_temp_path {home}/body;
    proxy_temp_path {home}/proxy;
    fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi;
    scgi_temp_path {home}/scgi;
    include {home}/onebitd.conf;
}}
"""
_HAPROXY_MAIN = """
global
    log stdout format raw local0
"""


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 that is ours, and on which the next process can listen.

    It is bound here and nobody listens: who connects meanwhile is refused.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@dataclass(frozen=True)
class Front:
    """A running proxy.

    Attributes:
        name: nginx or haproxy.
        headers: what each request has, unless it says otherwise.
    """

    name: str
    port: int
    headers: Mapping[str, str]

    def open(
        self, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request and return when the head of its reply is there.

        Args:
            body: JSON, or bytes as they are, to POST; None is a GET.
            headers: beside those of all requests; an empty value leaves one out.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **self.headers, **(headers or {})}
        sent = {name: value for name, value in sent.items() if value}
        try:
            connection.request("GET" if data is None else "POST", path, data, sent)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def ask(
        self, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> HttpReply:
        """Send a request and return the whole reply."""
        connection, response = self.open(path, body, headers)
        with contextlib.closing(connection):
            found = {name.lower(): value for name, value in response.getheaders()}
            return HttpReply(response.status, found, response.read())


def configuration(name: str, home: Path, port: int, instances: Mapping[int, int]) -> list[str]:
    """Write the shipped configuration with other addresses; return the program's arguments.

    Args:
        name: nginx or haproxy.
        home: where all its files go.
        port: to listen on.
        instances: the port of an instance by the one that the file has.
    """
    text = SHIPPED[name].read_text()
    for shipped, own in {8080: port, **instances}.items():
        text, count = re.subn(rf"(?m)^([^#\n]*127\.0\.0\.1:){shipped}\b", rf"\g<1>{own}", text)
        assert count == 1, f"{SHIPPED[name]} has 127.0.0.1:{shipped} {count} times"
    main = home / "main"
    main.write_text((_NGINX_MAIN if name == "nginx" else _HAPROXY_MAIN).format(home=home))
    (home / "onebitd.conf").write_text(text)
    if name == "nginx":
        return ["-p", str(home), "-e", str(home / "error.log"), "-c", str(main)]
    return ["-db", "-f", str(main), "-f", str(home / "onebitd.conf")]


@contextlib.contextmanager
def running_front(
    name: str, instances: Mapping[int, int], headers: Mapping[str, str]
) -> Iterator[Front]:
    """Run a proxy with the shipped configuration; skip (under CI fail) where there is none."""
    program = found_program(name)
    require_program("setpriv")
    with tempfile.TemporaryDirectory() as directory, held_port() as port:
        home = Path(directory)
        argv = configuration(name, home, port, instances)
        who: list[str] = []
        if os.geteuid() == 0:
            who = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
            for path in (home, *home.iterdir()):
                os.chown(path, NOBODY, NOBODY)
        log = home / "log"
        with log.open("wb") as log_file:
            process = subprocess.Popen(
                ["setpriv", *who, "--pdeathsig", "TERM", program, *argv],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                cwd="/",
            )
        try:
            wait_until(_listens(process, port, log), f"{name} listens", 20)
            yield Front(name, port, headers)
        except BaseException:
            for path in (log, home / "error.log"):
                if path.exists():
                    print(path.read_text(errors="replace")[-4000:])
            raise
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def found_program(name: str) -> str:
    """Return a program's path; Debian has both in /usr/sbin, where a user's PATH does not look."""
    path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if path is None:
        require_program(name)
        raise AssertionError("require_program() returned for a program that is not there")
    return path


def _listens(process: subprocess.Popen[bytes], port: int, log: Path) -> Callable[[], bool]:
    def listens() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
            return True
        return False

    return listens
