"""`make demo`: onebitd on a small real model, one chat through the handoff, and what it did.

Serves until Ctrl-C; with ONCE set it ends by itself, with status 0 if the handoff was used, else 1.
The device lock that it shows is a file of its own: the one of the machine is not its business.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent
LLAMA = ROOT / ".venv" / "llama"
CPU_ONLY = ["--device", "none", "-ngl", "0"]
INSTANCE = "demo"
QUESTION = "What is the capital of France? Answer in one short sentence."
READY_S = 300.0
_WAKE_S = 0.2
CONFIG = LLAMA.parent / "demo" / f"{INSTANCE}.toml"
LOCK = CONFIG.with_name("device.lock")
STATE = CONFIG.with_name("state")
"""History and what was learned: not in the home directory of whoever takes a look."""


def free_port(wanted: int) -> int:
    """Return the wanted port if it is free, else 0: onebitd then takes any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return 0
    return wanted


def write_config() -> None:
    """Write what no flag can say: where the device lock is, and that every prompt is handed off."""
    CONFIG.parent.mkdir(parents=True, exist_ok=True)
    # A JSON string is a TOML string, as long as it is not cut into surrogates.
    path = json.dumps(str(LOCK), ensure_ascii=False)
    CONFIG.write_text(
        f'# Written by `make demo`.\n[handoff]\npolicy = "always"\n[lock]\npath = {path}\n'
    )


def stop(daemon: subprocess.Popen[bytes]) -> None:
    """End the daemon in order and see it gone; each further Ctrl-C asks it again, so it hurries."""

    def hurry(_number: int, _frame: FrameType | None) -> None:
        daemon.terminate()

    # A handler that raises would end this wait, and leave the daemon running.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, hurry)
    daemon.terminate()
    # Without a timeout a signal just before the wait would be seen only after it.
    while daemon.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(_WAKE_S)


def onebitctl(*args: str) -> Any:
    """Return the JSON that onebitctl prints, None when no daemon answers."""
    command = [str(BIN / "onebitctl"), "-i", INSTANCE, *args, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return [json.loads(line) for line in lines] if lines else None


def wait_ready(daemon: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """Return the status of the ready daemon, None when it ended or was too slow."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and daemon.poll() is None:
        status = onebitctl("status")
        if status and status[0]["pid"] == daemon.pid and status[0]["state"] == "ready":
            found: dict[str, Any] = status[0]
            return found
        time.sleep(0.2)
    return None


def chat(address: str) -> tuple[int, dict[str, str], Any]:
    """Send the one request; return status, headers in lower case, and the decoded reply."""
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 24,
        "temperature": 0,
    }
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=600)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    headers = {name.lower(): value for name, value in response.getheaders()}
    reply = json.loads(response.read())
    connection.close()
    return response.status, headers, reply


def show(address: str) -> bool:
    """Do the handoff and print what happened; return whether it was used."""
    print(f"\nasking  {QUESTION}")
    status, headers, reply = chat(address)
    if status != 200:
        print(f"onebitd answered {status}: {reply['error']['message']}", file=sys.stderr)
        return False
    print(f"reply   {reply['choices'][0]['message']['content'].strip()}")
    records = onebitctl("handoffs", "-n", "1") or [{}]
    record = records[-1]
    print(f"handoff {record.get('outcome')}, way {headers.get('x-onebit-handoff')}")
    print(f"parts   {headers.get('server-timing')}")
    print(
        f"decoder evaluated_tokens {record.get('evaluated_tokens')} of "
        f"{record.get('prompt_tokens')} prompt tokens, {record.get('cached_tokens')} handed over"
    )
    return bool(record.get("outcome") == "used" and record.get("evaluated_tokens") == 1)


def main() -> int:
    """Run the demo."""
    once = bool(os.environ.get("ONCE"))
    port = free_port(int(os.environ.get("PORT") or 8000))
    environ = {
        **os.environ,
        "STATE_DIRECTORY": str(STATE),
        "ONEBIT_PREFILL_LLAMA_SERVER": str(LLAMA / "llama-server"),
        "ONEBIT_PREFILL_LLAMA_ARGS": " ".join(CPU_ONLY),
    }
    command = [
        str(BIN / "onebitd"),
        *("--config", str(CONFIG), "-m", str(LLAMA / "models" / "smollm2.gguf")),
        *("--llama-server", str(LLAMA / "llama-server")),
        *("--prefill-provider", str(BIN / "onebit-prefill-llama")),
        *("--port", str(port), "--", "-c", "4096", *CPU_ONLY),
    ]
    write_config()
    print(
        'policy "always": every prompt is handed off; "auto", the default, hands off what is '
        "sooner that way, which with this provider on the CPU is next to nothing"
    )
    print(f"starting {' '.join(command)}", flush=True)
    # A session of its own: Ctrl-C reaches this program alone, which then stops the daemon in order.
    daemon = subprocess.Popen(command, env=environ, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    used = False
    try:
        status = wait_ready(daemon)
        if status is None:
            print("onebitd did not become ready; its lines above say why", file=sys.stderr)
            return 1
        address = status["listen"][0]
        used = show(address)
        if not once:
            print(f"\nserving on http://{address}/v1 until Ctrl-C; try in another terminal:")
            print(
                f"  {BIN.relative_to(Path.cwd()) if BIN.is_relative_to(Path.cwd()) else BIN}"
                f"/onebitctl -i {INSTANCE} status",
                flush=True,
            )
            daemon.wait()
    except KeyboardInterrupt:
        print("\nstopping", file=sys.stderr)
    finally:
        stop(daemon)
    return 0 if used else 1


if __name__ == "__main__":
    sys.exit(main())
