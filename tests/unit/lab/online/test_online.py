"""What a search measures and keeps, without any process."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstride.core.control.events import Exchanged, KeepShares
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import ConfigError
from evenstride.lab.online.phase_measurements import facts_of, probe_of
from evenstride.lab.online.search_journal import NAME, SearchJournal, Switch, opened
from evenstride.planner.online_forecast import Configuration, Probe
from evenstride.planner.workload.workload_profile import Point
from evenstride.trace.codec import TraceWriter
from tests.messages import raises_message
from tests.unit.planner.runs import life


def test_a_phase_is_measured_once_enough_is_known_of_every_worker(tmp_path: Path) -> None:
    trace = life(tmp_path, workers=("a/0", "a/1"), busy_s={0: 0.1, 1: 0.2})

    assert probe_of(trace, 6) is None
    found = probe_of(trace, 5)

    assert found is not None
    assert (found.choice, found.steps) == (Configuration(2, 512), 5)
    assert found.points == (
        (Point(samples=256, step_s=0.1, steps=5),),
        (Point(samples=256, step_s=0.2, steps=5),),
    )
    assert found.step_s == pytest.approx(0.15)  # of the first worker, wait included
    assert found.communication_s == pytest.approx(0.05)
    assert found.noise is None


def test_without_a_measurement_of_one_worker_no_probe_exists(tmp_path: Path) -> None:
    assert probe_of(life(tmp_path, workers=("a/0", "a/1"), busy_s={0: 0.1}), 1) is None
    assert facts_of(tmp_path / "nowhere.jsonl") is None
    assert probe_of(tmp_path / "nowhere.jsonl", 1) is None


def trace_of(folder: Path, *observations: Observation) -> Path:
    """Return the trace of a single process with these observations."""
    trace = life(folder)
    formed, rest = trace.read_text().splitlines()[:-1], folder / "rest.jsonl"
    with TraceWriter(rest, {"policy": "uniform"}) as writer:
        steps = sum(one.steps for one in observations)
        seen = Exchanged(steps, steps, Measurements.of(observations))
        writer.event(2.0, seen, (KeepShares("good as is"),))
    trace.write_text("\n".join([*formed, *rest.read_text().splitlines()[1:]]) + "\n")
    return trace


def test_steps_that_the_processes_before_disturbed_do_not_count(tmp_path: Path) -> None:
    slow = Observation(0, 512, 0, (0.9, 0.8, 0.7, 0.6), (0.0,) * 4)
    first = Observation(0, 512, 4, (9.0,), (0.0,), modelled=False)
    calm = Observation(0, 512, 5, (0.1, 0.11) * 4, (0.0,) * 8)

    found = probe_of(trace_of(tmp_path, slow, first, calm), 5)

    assert found is not None
    (point,) = found.points[0]
    assert point.step_s == pytest.approx(0.11)
    assert point.steps == 12
    assert point.scatter < 0.15
    assert found.step_s == pytest.approx(0.105)


def test_a_step_is_the_mean_of_all_with_the_time_between_them(tmp_path: Path) -> None:
    """Half of the time is in one step of ten, and a tenth of it between steps."""
    steps = ((0.1,) * 9 + (0.9,)) * 8
    seen = Observation(0, 512, 0, steps, (0.01,) * 80, outside_s=0.8, control_wait_s=0.8)

    found = probe_of(trace_of(tmp_path, seen), 5)

    assert found is not None
    assert found.step_s == pytest.approx(0.18 + 0.01 + 0.02)
    assert found.points[0][0].step_s == pytest.approx(0.1)
    assert found.drift > 0.1


ASKED = {"script": ["train.py"], "workers": [1, 2], "epochs": 3.0}


def whole(folder: Path) -> SearchJournal:
    journal = opened(folder, ASKED)
    assert [journal.start_phase(), journal.start_phase()] == [1, 2]
    journal.note(Probe(Configuration(1, 32), 40, 0.5, ((Point(samples=32, step_s=0.4),),)))
    journal.decide("the next", 30)
    journal.switched(Switch(Configuration(1, 32), Configuration(2, 64), 0.25, 0.5), 4.5)
    journal.train(32, 320.0)
    journal.enter(Configuration(2, 64), 45)
    journal.stay(Configuration(1, 32), "the quickest")
    return journal


def test_a_search_goes_on_with_all_it_knew(tmp_path: Path) -> None:
    journal = whole(tmp_path)

    assert opened(tmp_path, ASKED) == journal
    assert (journal.phases, journal.reason, journal.search_s) == (2, "the quickest", 4.5)
    assert (journal.present, journal.chosen) == (Configuration(2, 64), Configuration(1, 32))
    assert journal.epochs == 45
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert journal.switch_s(9.0) == 0.75
    assert SearchJournal(tmp_path / NAME, ASKED).switch_s(9.0) == 9.0


def test_repeated_measurements_are_kept_with_the_earlier_ones(tmp_path: Path) -> None:
    journal = whole(tmp_path)
    (first,) = journal.probes
    again = Probe(Configuration(1, 32), 50, 0.6, ((Point(samples=32, step_s=0.5),),), drift=0.1)

    journal.note(again)

    assert opened(tmp_path, ASKED).probes == [first, again]


def test_samples_that_were_lost_are_not_trained(tmp_path: Path) -> None:
    journal = whole(tmp_path)

    journal.train(32, -20.0)
    assert journal.samples == 300.0
    journal.train(64, -20.0)
    assert journal.samples == 300.0


def test_a_folder_of_another_search_is_refused(tmp_path: Path) -> None:
    whole(tmp_path)

    with raises_message(ConfigError):
        opened(tmp_path, {**ASKED, "workers": [1], "epochs": 4.0})
    with raises_message(ConfigError, "trained"):
        opened(tmp_path, {**ASKED, "trained": [[8, 3.0], [16, 2.0]]})
    (tmp_path / NAME).write_text('{"format": 1, "asked": {}')
    with raises_message(ConfigError):
        opened(tmp_path, ASKED)
