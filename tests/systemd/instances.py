"""Instances of onebitd in a box: their files, their units, requests to them."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.llama_builds import BUILDS, CPU_ONLY, MODELS
from tests.systemd.box import Box, Done

BIN = "/opt/onebitd/bin"
CHECKOUT = "/srv/checkout"
STANDIN_DECODER = f"{CHECKOUT}/tests/standins/llama_server.py"
STANDIN_PROVIDER = f"{CHECKOUT}/tests/standins/provider.py"
REAL_DECODER = "/srv/llama/llama-server-b"
REAL_MODEL = "/srv/llama/models/smollm2.gguf"
TINY_MODEL = "/srv/tiny.gguf"
_MAKE_TINY = (
    f"import sys; sys.path.insert(0, {CHECKOUT!r}); from tests.standins import tiny_state; "
    f"open({TINY_MODEL!r}, 'wb').write(tiny_state.gguf())"
)


@dataclass(frozen=True)
class Instance:
    """One instance: its name, its port, the box it is in."""

    box: Box
    name: str
    port: int

    @property
    def service(self) -> str:
        """Its service's unit."""
        return f"onebitd@{self.name}.service"

    @property
    def units(self) -> tuple[str, str, str]:
        """All its units: the service, the control socket, the HTTP socket."""
        return (
            self.service,
            f"onebitd@{self.name}.socket",
            f"onebitd-http@{self.name}.socket",
        )

    @property
    def knobs(self) -> str:
        """The file that the stand-in decoder reads its arguments from, for each request."""
        return f"/srv/knobs/{self.name}"

    def systemctl(self, verb: str, *, check: bool = True, timeout_s: float = 90.0) -> Done:
        """Do something with its service."""
        return self.box.run("systemctl", verb, self.service, check=check, timeout_s=timeout_s)

    def show(self, *properties: str) -> dict[str, str]:
        """Return properties of its service."""
        return self.box.show(self.service, *properties)

    def ctl(self, *args: str, check: bool = True) -> Done:
        """Run onebitctl for it as root."""
        return self.box.run(f"{BIN}/onebitctl", "-i", self.name, *args, check=check)

    def status(self) -> Any:
        """Return /v1/status; status 1 says that something is not fine, and is fine here."""
        return json.loads(self.ctl("status", "--json", check=False).stdout)

    def handoffs(self) -> list[dict[str, Any]]:
        """Return the records of its last handoffs."""
        return [json.loads(line) for line in self.ctl("handoffs", "--json").stdout.splitlines()]

    def curl_argv(
        self, path: str, body: object = None, *, headers: Sequence[str] = (), limit_s: int = 60
    ) -> list[str]:
        """Return a curl command line that prints body, newline and status."""
        argv = ["curl", "-sS", "-N", "--max-time", str(limit_s), "-w", "\n%{http_code}"]
        for header in headers:
            argv += ["-H", header]
        if body is not None:
            argv += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return [*argv, f"http://127.0.0.1:{self.port}{path}"]

    def request(
        self, path: str, body: object = None, *, headers: Sequence[str] = ()
    ) -> tuple[int, str]:
        """Return status and body of a request; status 0 when there was no reply."""
        done = self.box.run(*self.curl_argv(path, body, headers=headers), check=False)
        text, _, code = done.stdout.rpartition("\n")
        return int(code), text

    def chat(self, content: str, *, headers: Sequence[str] = (), **more: Any) -> str:
        """Return the text of a greedy chat reply; AssertionError unless 200."""
        code, text = self.request(
            "/v1/chat/completions", chat_body(content, **more), headers=headers
        )
        assert code == 200, (code, text)
        return str(json.loads(text)["choices"][0]["message"]["content"])

    def drop_in(self, text: str, unit: int = 0) -> None:
        """Write a drop-in of one of its `units`; the caller has systemd read it."""
        self.box.write(f"/etc/systemd/system/{self.units[unit]}.d/test.conf", text)

    def main_pid(self) -> int:
        """Return the pid of the daemon, as the box sees it."""
        return int(self.show("MainPID")["MainPID"])

    def decoder_pid(self) -> int:
        """Return the pid of the decoder, 0 while there is none."""
        return int(self.status()["backend"]["pid"] or 0)

    def children_by_name(self) -> list[int]:
        """Return the pids of decoder and provider, wherever they are: they name its directory."""
        done = self.box.run("pgrep", "-f", f"/run/onebitd/{self.name}/", check=False)
        return [int(pid) for pid in done.stdout.split()]

    def processes(self) -> list[str]:
        """Return the command lines in its service's control group."""
        cgroup = self.show("ControlGroup")["ControlGroup"]
        if not cgroup:
            return []
        script = (
            f"for pid in $(cat /sys/fs/cgroup{shlex.quote(cgroup)}/cgroup.procs 2>/dev/null); do "
            "tr '\\0' ' ' </proc/$pid/cmdline; echo; done"
        )
        return self.box.run("sh", "-c", script, check=False).stdout.splitlines()

    def wait_state(self, state: str, timeout_s: float = 60.0) -> None:
        """Wait until `systemctl is-active` says this of its service."""
        self.box.wait_until(
            lambda: self.show("ActiveState")["ActiveState"] == state,
            f"{self.service} {state}",
            timeout_s,
        )

    def wait_status_text(self, start: str, timeout_s: float = 60.0) -> str:
        """Wait until its STATUS= line starts so; return it."""

        def text() -> str:
            found = self.show("StatusText")["StatusText"]
            return found if found.startswith(start) else ""

        return str(self.box.wait_until(text, f"STATUS={start}...", timeout_s))

    def journal(self, *matches: str) -> list[dict[str, Any]]:
        """Return its journal's records, the service manager's own about it included."""
        return self.box.journal("-u", self.service, *matches)


def chat_body(content: str, **more: Any) -> dict[str, Any]:
    """Return the body of a greedy chat of one user message."""
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "seed": 1}
    return {"max_tokens": 8, **body, **more}


def toml(config: Mapping[str, Mapping[str, object]]) -> str:
    """Return a configuration file; JSON's values are TOML's, but for tables."""

    def value(item: object) -> str:
        if isinstance(item, Mapping):
            return "{ " + ", ".join(f"{key} = {value(part)}" for key, part in item.items()) + " }"
        return json.dumps(item)

    lines = []
    for section, settings in config.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {value(item)}" for key, item in settings.items()]
    return "\n".join(lines) + "\n"


def configuration(
    name: str,
    port: int,
    *,
    real: bool,
    decoder: Sequence[str] = (),
    **more: Mapping[str, object],
) -> dict[str, dict[str, object]]:
    """Return the configuration of an instance on the real decoder or the stand-in.

    It hands off every prompt: the default policy weighs both ways, and here the decoder would win.

    Args:
        decoder: more arguments of the decoder.
        more: settings by section, over what is here.
    """
    if real:
        config: dict[str, dict[str, object]] = {
            "model": {"path": REAL_MODEL, "ctx_size": 512},
            "backend": {"llama_server": REAL_DECODER, "args": [*CPU_ONLY, "-t", "1", *decoder]},
            "provider": {
                "program": f"{BIN}/onebit-prefill-llama",
                "env": {
                    "ONEBIT_PREFILL_LLAMA_SERVER": REAL_DECODER,
                    "ONEBIT_PREFILL_LLAMA_ARGS": " ".join((*CPU_ONLY, "-t", "1")),
                },
            },
        }
    else:
        config = {
            "model": {"path": TINY_MODEL},
            "backend": {
                "llama_server": STANDIN_DECODER,
                "args": ["--knobs", f"/srv/knobs/{name}", *decoder],
            },
            "provider": {"program": STANDIN_PROVIDER},
        }
    config["http"] = {"port": port}
    config["handoff"] = {"policy": "always"}
    for section, settings in more.items():
        config.setdefault(section, {}).update(settings)
    return config


def write_instance(
    box: Box,
    name: str,
    port: int,
    *,
    real: bool = False,
    decoder: Sequence[str] = (),
    **more: Mapping[str, object],
) -> Instance:
    """Write the configuration of an instance, and what it needs; see `configuration`."""
    if real:
        BUILDS[0].require()
        MODELS[0].require()
    elif not box.exists(TINY_MODEL):
        box.run("python3", "-c", _MAKE_TINY)
    instance = Instance(box, name, port)
    text = toml(configuration(name, port, real=real, decoder=decoder, **more))
    box.write(f"/etc/onebitd/{name}.toml", text, 0o640)
    box.run("chgrp", "onebitd", f"/etc/onebitd/{name}.toml")
    box.write(instance.knobs, "")
    return instance


@contextlib.contextmanager
def instance_in(
    box: Box,
    name: str,
    port: int,
    *,
    real: bool = False,
    decoder: Sequence[str] = (),
    start: bool = True,
    **more: Mapping[str, object],
) -> Iterator[Instance]:
    """Yield an instance, started unless told otherwise; leave the box as it was.

    Whatever the test did: its units are stopped, disabled and forgotten, its files removed.
    """
    instance = write_instance(box, name, port, real=real, decoder=decoder, **more)
    try:
        if start:
            instance.systemctl("start")
        yield instance
    finally:
        remove_instances(box, instance)


def remove_instances(box: Box, *instances: Instance) -> None:
    """Stop, disable and forget the units of instances; remove their files."""
    units = [unit for instance in instances for unit in reversed(instance.units)]
    box.run("systemctl", "disable", "--now", *units, check=False)
    box.run("systemctl", "reset-failed", *units, check=False)
    leftovers = []
    for instance in instances:
        leftovers += [
            f"/etc/onebitd/{instance.name}.toml",
            f"/etc/onebitd/{instance.name}.env",
            *(f"/etc/systemd/system/{unit}.d" for unit in instance.units),
            f"/run/onebitd/{instance.name}",
            f"/var/lib/onebitd/{instance.name}",
            f"/var/cache/onebitd/{instance.name}",
            instance.knobs,
        ]
    box.run("rm", "-rf", *leftovers)
    box.run("systemctl", "daemon-reload")
