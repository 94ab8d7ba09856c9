"""Device telemetry of a whole daemon on the stand-ins, with a made-up sysfs."""

from __future__ import annotations

import os
from pathlib import Path

from tests.e2e.standin_route import Route, running_route
from tests.harness import wait_until
from tests.llama_builds import UnixConnection
from tests.sysfs_tree import Sysfs

THREAD = "devices"
PROMPT = "How busy is it over there, while you are at work on these words?"


def on_tree(tree: Sysfs) -> dict[str, str]:
    return {"ONEBIT_DEBUG_SYSFS": str(tree.root)}


def scraped(route: Route) -> str:
    connection = UnixConnection(route.daemon.runtime / "control.sock", 10.0)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def thread_names(route: Route) -> set[str]:
    tasks = Path(f"/proc/{route.daemon.process.pid}/task")
    return {(task / "comm").read_text().strip() for task in tasks.iterdir()}


def busy_of(route: Route) -> float | None:
    found = route.record_of(route.daemon.completion(PROMPT)).get("gpu_busy_percent")
    return None if found is None else float(found)


def test_record_says_how_busy_the_gpu_was(tmp_path: Path) -> None:
    """The tree's figure, and another one when that has changed; status and metrics show it too.

    A driver that stops answering takes the figure away, and nothing else.
    """
    tree = Sysfs(tmp_path / "sys")
    tree.gpu("card0", busy="12")
    tree.npu("accel0", "amdxdna", {"power/runtime_status": "active"})
    with running_route(env=on_tree(tree)) as route:
        for child in route.daemon.children():
            assert b"ONEBIT_DEBUG_SYSFS" not in Path(f"/proc/{child}/environ").read_bytes()
        assert route.daemon.status()["devices"] == []  # nobody has asked for anything yet
        record = route.record_of(route.daemon.completion(PROMPT))
        assert (record["outcome"], record["gpu_busy_percent"]) == ("used", 12.0)
        card, npu = route.daemon.status()["devices"]
        assert (card["kind"], card["name"], card["busy_percent"]) == ("gpu", "card0", 12.0)
        assert (npu["kind"], npu["power_state"], npu["busy_percent"]) == ("npu", "active", None)
        metrics = scraped(route)
        assert 'onebitd_device_busy_ratio{device="card0",kind="gpu"} 0.12' in metrics
        tree.write("card0", "gpu_busy_percent", "93")
        wait_until(lambda: busy_of(route) == 93.0, "the new figure")
        # What blocks an open(2) of a FIFO for good is that nobody writes.
        silent = tmp_path / "silent"
        os.mkfifo(silent)
        silent.replace(tree.device("card0") / "gpu_busy_percent")
        wait_until(lambda: busy_of(route) is None, "the end of the figure")
        assert THREAD in thread_names(route)  # it is left behind
        wait_until(lambda: route.daemon.log_records("device_silent"), "a word about it")
        assert route.record_of(route.daemon.completion(PROMPT))["outcome"] == "used"


def test_no_device_no_figure_and_no_thread(tmp_path: Path) -> None:
    """Where there is neither GPU nor NPU nobody reads anything, in no thread."""
    tree = Sysfs(tmp_path / "sys")
    tree.sensor("hwmon0", "k10temp", "50000")  # alone, it is none
    with running_route(env=on_tree(tree)) as route:
        assert busy_of(route) is None
        assert route.daemon.status()["devices"] == []
        assert THREAD not in thread_names(route)
