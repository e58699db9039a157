"""Fixtures and guards of all tests, and the list of slow tests."""

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

# Hypothesis draws other examples in each run, stores failing ones in .hypothesis and tries these
# first in the next run. A CI machine does not keep that folder. There the examples follow from the
# test's code, so that CI=true reproduces a failure on any machine.
_HYPOTHESIS = settings.get_profile("ci" if os.environ.get("CI") else "default")
for profile, examples in (("short", 25), ("long", 2000)):
    settings.register_profile(
        profile, _HYPOTHESIS, deadline=None, max_examples=examples, print_blob=True
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


# Folders and files that only `make test-slow` runs. Of the tests on real processes, `make test`
# keeps those that prove the promises in docs/explanation/guarantees.md: exactness, one trajectory
# and, in faults/test_matrix.py, exactly once through kills, joins and departures.
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
    "integrations/test_launcher_schemas.py",
    "integrations/test_launchers.py",
    "integrations/test_lightning_examples.py",
    "integrations/test_lightning_options.py",
    "integrations/test_streaming_data.py",
    "integrations/test_grafana.py",
    "integrations/test_ray.py",
    "integrations/test_tensorflow.py",
    "integrations/test_trackers.py",
    "live/",
    "multiproc/test_examples.py",
    "multiproc/test_free.py",
    "multiproc/test_islands.py",
    "multiproc/test_online.py",
    "multiproc/test_open_batch.py",
    "multiproc/test_ports.py",
    "multiproc/test_profiling.py",
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
    "virtual_device/",
)
# Tests that measure times are slow too. These two stay in `make test`: they check the times that
# observations and summaries consist of.
QUICKLY_MEASURED = ("multiproc/test_attribution.py", "multiproc/test_timing.py")
# Tests of slow files that stay in `make test`, so that every promise has one there.
PROMISED = (
    "integrations/test_ray.py::test_unequal_batches_train_as_one_process_does",
    "integrations/test_ray.py::test_the_same_batches_without_evenstride_give_a_wrong_gradient",
    "integrations/test_ray.py::test_what_cannot_be_exact_is_refused_alike_on_every_worker",
    "faults/test_losses.py::test_every_survivor_names_the_lost_rank_in_one_line",
    "faults/test_damages.py::test_random_damage_never_restarts_from_scratch_and_never_deletes[0]",
    "multiproc/test_trials.py::test_a_calibration_by_hand_leaves_checkpoints",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m 'slow ...'`` or ``-m '... alone'``, leave out modules without such tests.

    To import all modules takes 15 s.
    """
    wanted = config.option.markexpr.split(" and ")
    if not {"slow", "alone"} & {*wanted} or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    alone, slow = (f"pytest.mark.{marker}" in text for marker in ("alone", "slow"))
    listed = collection_path.relative_to(Path(__file__).parent).as_posix().startswith(SLOW)
    return None if alone or ("alone" not in wanted and (slow or listed)) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the slow tier."""
    tests = Path(__file__).parent
    for item in items:
        if not item.path.is_relative_to(tests):
            continue
        path = item.path.relative_to(tests).as_posix()
        measures = item.get_closest_marker("alone") and path not in QUICKLY_MEASURED
        slow = path.startswith(SLOW) and not f"{path}::{item.name}".startswith(PROMISED)
        if measures or slow:
            item.add_marker("slow")


def pytest_sessionstart() -> None:
    """Collect tests without garbage collection, as nothing is garbage yet."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, which took a sixth of the test time."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """A pool of rank processes that persists between tests and grows as tests need it."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with the data sets. Without it, tests that need a data set are skipped."""
    default = Path(__file__).parents[1] / ".." / "shared" / "data"
    root = Path(os.environ.get("EVENSTRIDE_DATA", default))
    if not root.is_dir():
        pytest.skip("data sets not found: set EVENSTRIDE_DATA to their folder")
    return root


OUR_VARIABLES = ("EVENSTRIDE_", "_EVENSTRIDE_")


@pytest.fixture(autouse=True)
def scrubbed_environment() -> Iterator[None]:
    """Hide settings of the developer's shell, and those of earlier tests, from a test."""
    with patch.dict(os.environ):
        for name in list(os.environ):
            if name.startswith(OUR_VARIABLES) and name != "EVENSTRIDE_DATA":
                del os.environ[name]
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        # Otherwise the width of output would depend on the terminal that pytest has or has not.
        os.environ["COLUMNS"] = "80"
        # Otherwise commands would write to, and plan with, what the developer measured.
        os.environ["EVENSTRIDE_STORE"] = "off"
        yield
    # A `Stride` made as inside `evenstride` commands guards checkpoint files of the whole process.
    if (guard := sys.modules.get("evenstride.runtime.script_saves")) is not None:
        guard.guard_saves(None)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a thread running or the environment changed."""
    threads, variables = set(threading.enumerate()), dict(os.environ)
    yield
    left = [t.name for t in threading.enumerate() if t not in threads and t.name.startswith("even")]
    assert not left, f"the test left threads running: {left}"
    changed = {k for k in variables.keys() | os.environ.keys() if k.startswith(OUR_VARIABLES)}
    changed = {k for k in changed if variables.get(k) != os.environ.get(k)}
    assert not changed, f"the test left the environment changed: {changed}"
