"""The provider of forty lines in onebit-provider(7), and what its reader types for it."""

from __future__ import annotations

import re
import shlex

from tests.llama_builds import ROOT

PAGE = ROOT / "man" / "onebit-provider.7"
HOME = "/dev/shm/prefill-warm"
"""Where the page has the socket and the slots of the llama-server that the provider asks."""
PROGRAM = "/usr/local/bin/prefill-warm"
LLAMA_SERVER = "/opt/llama.cpp/bin/llama-server"
MODEL = "/srv/models/model.gguf"


def listing(first: str) -> str:
    """Return the listing of the page that begins so, as its reader sees it."""
    found = re.search(
        rf"^\.Bd -literal[^\n]*\n({re.escape(first)}.*?)^\.Ed", PAGE.read_text(), re.M | re.S
    )
    assert found, first
    return found.group(1).replace("\\e", "\\").replace("\\&", "")


def provider() -> str:
    """Return the program."""
    return listing("#!/usr/bin/python3\n")


def commands() -> tuple[list[str], list[str], list[str]]:
    """Return the words that make the directories, remove an old socket, start the llama-server."""
    text = listing("# runuser -u onebitd -- mkdir").replace("\\\n", "")
    mkdir, remove, server = (shlex.split(line.removeprefix("# ")) for line in text.splitlines())
    return mkdir, remove, server


def configuration() -> str:
    """Return the section of the configuration."""
    return listing(f'[provider]\nprogram = "{PROGRAM}"')
