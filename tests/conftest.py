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

# Other examples in each run; what fails is kept in .hypothesis and tried first the next time. On a
# CI machine, where nobody keeps that folder, the examples follow from the test's code, so that what
# fails there fails here too, under CI=true.
_HYPOTHESIS = settings.get_profile("ci" if os.environ.get("CI") else "default")
for profile, examples in (("short", 25), ("long", 2000)):
    settings.register_profile(
        profile, _HYPOTHESIS, deadline=None, max_examples=examples, print_blob=True
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


# Folders and files that `make test` leaves to `make test-slow`. Of the process tests, `make test`
# keeps those that hold the promises in docs/explanation/guarantees.md: exactness, one trajectory, and, in
# faults/test_matrix.py, exactly once through kills, joins and departures.
SLOW = (
    "docs/test_commands.py",
    "docs/test_site.py",
    "docs/test_site_in_a_browser.py",
    "docs/test_tutorial.py",
    "faults/test_damages.py",
    "faults/test_hosts.py",
    "faults/test_losses.py",
    "faults/test_ports_hosts.py",
    "faults/test_served.py",
    "faults/test_served_hosts.py",
    "faults/test_served_leaving.py",
    "faults/test_turns.py",
    "live/",
    "multiproc/test_examples.py",
    "multiproc/test_free.py",
    "multiproc/test_islands.py",
    "multiproc/test_online.py",
    "multiproc/test_open_batch.py",
    "multiproc/test_ports.py",
    "multiproc/test_profiling.py",
    "multiproc/test_recipes.py",
    "multiproc/test_serving.py",
    "multiproc/test_trials.py",
    "multiproc/test_unaligned.py",
    "unit/benchmarks/",
    "unit/cli/commands/test_doctor_bench.py",
    "unit/cli/test_changed_traces.py",
    "unit/core/sampling/test_permutation.py",
    "unit/planner/test_spot_recordings_spot.py",
    "unit/report/page/test_browser.py",
    "unit/runtime/checkpoint/test_damage.py",
    "unit/runtime/checkpoint/test_exits.py",
    "unit/runtime/checkpoint/test_forged.py",
    "unit/runtime/noise/test_noise_meter_of_network.py",
    "unit/testing/faults/test_supervisor.py",
)
# What measures is slow as well, but for the times that observations and summaries are made of.
QUICKLY_MEASURED = ("multiproc/test_attribution.py", "multiproc/test_timing.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the slow tier."""
    tests = Path(__file__).parent
    for item in items:
        if not item.path.is_relative_to(tests):
            continue
        path = item.path.relative_to(tests).as_posix()
        measures = item.get_closest_marker("alone") and path not in QUICKLY_MEASURED
        if measures or path.startswith(SLOW):
            item.add_marker("slow")


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


OUR_VARIABLES = ("EVENSTRIDE_", "_EVENSTRIDE_")


@pytest.fixture(autouse=True)
def scrubbed_environment() -> Iterator[None]:
    """No setting of the developer's shell reaches a test, and none of a test the next one."""
    with patch.dict(os.environ):
        for name in list(os.environ):
            if name.startswith(OUR_VARIABLES) and name != "EVENSTRIDE_DATA":
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
    changed = {k for k in variables.keys() | os.environ.keys() if k.startswith(OUR_VARIABLES)}
    changed = {k for k in changed if variables.get(k) != os.environ.get(k)}
    assert not changed, f"the test left the environment changed: {changed}"
