"""What is tracked speaks of the project alone, not of a machine that it was written on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.llama_builds import ROOT, require_program

# Each in two parts, so that this file does not hold what it looks for.
PATTERNS = {
    "a home directory": "/home" + r"/(?!USER\b)\w",  # USER stands for any
    "root's home directory": "/roo" + r"t/[\w.]",
    "a mounted working tree": "/wor" + r"k/\w",
    "the scratch directory of a machine": "/tmp/" + r"scratch\b",
    "the path of this checkout": re.escape(str(ROOT)) + r"(?![\w.-])",
    "a Python registry": "pypi" + r"\.org|python" + r"hosted\.org",
    "a JavaScript registry": "npm" + r"js\.(org|com)",
    "a Rust registry": "crates" + r"\.io",
    "a model registry": "hugging" + r"face\.co|model" + r"scope\.cn",
    "a container registry": "docker" + r"\.io|gh" + r"cr\.io",
}


def tracked_files() -> list[Path]:
    """Return the files of the repository: tracked, or new and not ignored."""
    require_program("git")
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = done.stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("what", PATTERNS)
def test_tracked_files_do_not_name(what: str) -> None:
    """No line of any file matches; each that does is named."""
    pattern = re.compile(PATTERNS[what])
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in tracked_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, f"{what}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a home directory", 'MODEL = "/home' + '/bob/model.gguf"'),
        ("the path of this checkout", f"cd {ROOT} && make"),
        ("a Python registry", "https://pypi" + ".org/simple"),
    ],
)
def test_patterns_find_what_they_are_for(what: str, line: str) -> None:
    """The test above can fail."""
    assert re.search(PATTERNS[what], line)
