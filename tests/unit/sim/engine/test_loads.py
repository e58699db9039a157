"""What virtual workers tell of the load on their machines, where a recording of it is replayed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from evenstride.core.control.advance import advance
from evenstride.core.control.events import Event, Exchanged
from evenstride.core.control.state import Control
from evenstride.core.policies import policy_from_spec
from evenstride.sim.engine.lockstep import Simulation
from evenstride.sim.scenario.recordings import load_recording
from evenstride.sim.scenario.timeline import Timeline
from tests.unit.sim.clusters import scenario

RECORDED = np.array([[20.0] * 144 + [60.0] * 144, [95.0] * 288])
EVENT = {"kind": "replay", "at": 2, "workers": [1], "machines": [0], "steps_per_sample": 1}
SLOW = {"kind": "step", "at": 0, "workers": [0, 1], "speed": 0.5}


@pytest.fixture(autouse=True)
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two machines, of which the first gets busier at noon."""
    (tmp_path / "traces").mkdir()
    np.savez(tmp_path / "traces" / "planetlab-cpu.npz", cpu_20110303=RECORDED)
    monkeypatch.setenv("EVENSTRIDE_DATA", str(tmp_path))
    load_recording.cache_clear()
    yield
    load_recording.cache_clear()


def test_the_load_is_the_recorded_one_and_unknown_of_the_others() -> None:
    timeline = Timeline(scenario(steps=200, events=[SLOW, EVENT]), 0)

    for step, load in ((0, 0.0), (2, 0.2), (145, 0.2), (146, 0.6)):
        assert timeline.load(step)[1] == pytest.approx(load)
        assert np.isnan(timeline.load(step)[0]), "a slow machine need not be a busy one"


def test_every_report_has_the_load_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[list[float]] = []

    def noting(control: Control, event: Event) -> object:
        if isinstance(event, Exchanged):
            reported.append(
                [float(seen.cpu_load) for seen in event.observations if seen.worker == 1]
            )
        return advance(control, event)

    monkeypatch.setattr("evenstride.sim.engine.lockstep.advance", noting)
    plain = scenario(steps=148, events=[EVENT], exchange={"every": 4, "lag": 1})

    Simulation(plain, policy_from_spec("uniform")).run()

    assert reported[0] == pytest.approx([0.2]), "of four steps, two were not yet busy"
    assert reported[-2] == pytest.approx([0.2])
    assert {round(load, 9) for load in reported[-1]} == {0.6}, "whatever it is cut into"
