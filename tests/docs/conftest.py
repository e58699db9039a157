"""The built site."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; made in a folder of its own, by the command of the Makefile."""
    if not (find_spec("zensical") and find_spec("mkdocstrings") and shutil.which("make")):
        pytest.skip("zensical, mkdocstrings-python or make is not installed")
    here = tmp_path_factory.mktemp("site")
    for name in ("docs", "examples", "src"):
        shutil.copytree(ROOT / name, here / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "Makefile"]:
        shutil.copy(path, here)
    (here / "bin").symlink_to(Path(sys.executable).parent)
    done = subprocess.run(
        ["make", "--assume-old=.venv/.docs", "docs", "BIN=bin"],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr
    return here / "site"
