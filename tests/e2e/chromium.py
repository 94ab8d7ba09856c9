"""A headless Chromium for a test, driven through chromedriver by the WebDriver protocol (W3C)."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import wait_until

PROGRAMS = ("chromium", "chromedriver")
_ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-device-scale-factor=1"),
    "--no-proxy-server",
)


def require_chromium() -> None:
    """Skip without Debian's chromium and chromium-driver; under CI fail."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if not missing:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"not installed: {', '.join(missing)}", pytrace=False)
    pytest.skip(f"not installed: {', '.join(missing)}")


class Browser:
    """One session; every method is one command of the protocol."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._session = ""

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send a command of the session and return its value; AssertionError if it failed."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            sent = None if method != "POST" else json.dumps(body or {})
            connection.request(method, self._session + path, sent)
            reply = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        assert not (isinstance(reply, dict) and "error" in reply), reply
        return reply

    def begin(self, profile: Path) -> None:
        """Start the browser on an empty profile."""
        options = {
            "binary": shutil.which("chromium"),
            "args": [*_ARGUMENTS, f"--user-data-dir={profile}"],
        }
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        found = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{found['sessionId']}"

    def end(self) -> None:
        """Close the browser."""
        if self._session:
            self.call("DELETE", "")

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        self.call("POST", "/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """Return what a function body returns in the page."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector: str) -> str:
        """Return the text of an element, the empty one when it is not there."""
        script = "const n = document.querySelector(arguments[0]); return n ? n.innerText : ''"
        return str(self.run(script, selector))

    def wait(self, script: str, what: str, *args: Any) -> Any:
        """Wait until a function body returns something true in the page."""
        return wait_until(lambda: self.run(script, *args), what, 20, every_s=0.05)

    def devtools(self, command: str, **params: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def look(self, width: int, height: int, scheme: str) -> None:
        """Set the size of the page in pixels, and `dark` or `light`."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        found = self.devtools("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def console(self) -> list[str]:
        """Return what the console has got since the last call."""
        found = self.call("POST", "/se/log", {"type": "browser"})
        return [f"{one['level']}: {one['message']}" for one in found]


@contextlib.contextmanager
def running_chromium() -> Iterator[Browser]:
    """Run a browser for the block; nothing of it is left."""
    require_chromium()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        home = Path(directory)
        log = home / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["chromedriver", "--port=0"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=home,
                env={**os.environ, "HOME": str(home), "TMPDIR": str(home)},
            )
        try:
            started = re.compile(r"successfully on port (\d+)")
            found = wait_until(lambda: started.search(log.read_text()), "chromedriver is ready")
            browser = Browser(int(found[1]))
            try:
                browser.begin(home / "profile")
                yield browser
            finally:
                browser.end()
        finally:
            process.terminate()
            process.wait(20)
