"""Fixtures and guards for all tests."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings

from evenstride.testing import RankPool

settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_finish() -> None:
    """Keep what has been imported out of garbage collections, which took a sixth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that are kept between tests, as many as a test asks for."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with the data sets; tests that need one are skipped without it."""
    default = Path(__file__).parents[1] / ".." / "shared" / "data"
    root = Path(os.environ.get("EVENSTRIDE_DATA", default))
    if not root.is_dir():
        pytest.skip("no data sets: set EVENSTRIDE_DATA to their folder")
    return root


@pytest.fixture(autouse=True)
def scrubbed_environment() -> Iterator[None]:
    """No setting of the developer's shell reaches a test, and none of a test the next one."""
    with patch.dict(os.environ):
        for name in list(os.environ):
            if name.startswith("EVENSTRIDE_") and name != "EVENSTRIDE_DATA":
                del os.environ[name]
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        yield
    # A `Stride` made as in a command's run guards checkpoint files in the whole process.
    if (guard := sys.modules.get("evenstride.runtime.script_saves")) is not None:
        guard.guard_saves(None)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """A test that leaves a thread or a changed environment behind fails."""
    threads, variables = set(threading.enumerate()), dict(os.environ)
    yield
    left = [t.name for t in threading.enumerate() if t not in threads and t.name.startswith("even")]
    assert not left, f"the test left threads behind: {left}"
    changed = {k for k in variables.keys() | os.environ.keys() if k.startswith("EVENSTRIDE_")}
    changed = {k for k in changed if variables.get(k) != os.environ.get(k)}
    assert not changed, f"the test left the environment changed: {changed}"
