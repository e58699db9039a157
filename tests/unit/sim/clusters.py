"""Small scenarios for tests, made by hand or by Hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import reject
from hypothesis import strategies as st
from pydantic import ValidationError

from evenstride.sim.scenario.builtin_scenarios import SCENARIOS
from evenstride.sim.scenario.scenario_model import Scenario

REFERENCE = SCENARIOS / "reference.yaml"

FAST = {"name": "fast", "samples_per_s": 1000.0, "fixed_s": 0.01}
PHASES = ["common", "separate"]
SLOW = {"name": "slow", "samples_per_s": 250.0, "fixed_s": 0.01}


def scenario(**values: Any) -> Scenario:
    """Return a scenario with these values; a fast and a slow worker by default."""
    plain = {"name": "made", "global_batch": 50, "steps": 40, "workers": [FAST, SLOW], **values}
    return Scenario.model_validate(plain)


def moments(steps: int) -> st.SearchStrategy[int]:
    """Draw a step of a scenario."""
    return st.integers(0, steps - 1)


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    """Draw some workers of one kind."""
    least = draw(st.integers(1, 3))
    return {
        "count": draw(st.integers(1, 3)),
        "samples_per_s": draw(st.floats(10, 1000)),
        "fixed_s": draw(st.floats(0, 0.1)),
        "floor_s": draw(st.floats(0, 0.2)),
        "saturates_at": draw(st.none() | st.integers(1, 40)),
        "beyond": draw(st.floats(1, 5)),
        "wave": draw(st.just(1) | st.integers(1, 12)),
        "cliff_at": draw(st.none() | st.integers(1, 40)),
        "cliff_factor": draw(st.floats(1, 20)),
        "quantum": draw(st.none() | st.integers(1, 4)),
        "min_share": least,
        "max_share": draw(st.none() | st.integers(15, 60)),
        "noise": draw(st.floats(0, 0.2)),
        "noise_correlation": draw(st.just(0.0) | st.floats(0, 0.99)),
        "noise_tail": draw(st.none() | st.floats(2.1, 10)),
        "noise_common": draw(st.just(0.0) | st.floats(0, 1)),
        "spike_rate": draw(st.floats(0, 0.1)),
        "new_share_s": draw(st.just(0.0) | st.floats(0, 0.5)),
    }


@st.composite
def speed_events(draw: st.DrawFn, steps: int, workers: int) -> dict[str, Any]:
    """Draw a change of speed."""
    speed = draw(st.floats(0.2, 4))
    event = {"at": draw(moments(steps)), "workers": draw(st.integers(0, workers - 1))}
    duty, phases = draw(st.floats(0.01, 1)), {"phases": draw(st.sampled_from(PHASES))}
    kinds: list[dict[str, Any]] = [
        {"kind": "step"},
        {"kind": "ramp", "steps": draw(st.integers(1, steps))},
        {"kind": "periodic", "period": draw(st.integers(2, steps)), "duty": duty, **phases},
        {"kind": "wave", "period": draw(st.integers(2, steps)), **phases},
        {
            "kind": "bursty",
            "mean_steps": draw(st.floats(1, 9)),
            "mean_gap": draw(st.floats(1, 9)),
            **phases,
        },
    ]
    if draw(st.booleans()):
        return {**event, "kind": "walk", "spread": draw(st.floats(0.001, 0.5)), **phases}
    return {**event, **draw(st.sampled_from(kinds)), "speed": speed}


@st.composite
def scenarios(draw: st.DrawFn, every: st.SearchStrategy[Any] | None = None) -> Scenario:
    """Draw a scenario of up to nine workers, some of which may leave for a while."""
    steps = draw(st.integers(5, 30))
    kinds = draw(st.lists(groups(), min_size=1, max_size=3))
    size = sum(kind["count"] for kind in kinds)
    events = draw(st.lists(speed_events(steps, size), max_size=3))
    if size > 2 and draw(st.booleans()):
        gone = draw(st.integers(1, size - 1))
        left, back = sorted(draw(st.tuples(moments(steps), moments(steps))))
        events.append({"kind": "leave", "at": left, "workers": gone})
        if back > left:
            events.append({"kind": "join", "at": back, "workers": gone})
    values = {
        "steps": steps,
        "global_batch": draw(st.integers(30, 45)),
        "workers": kinds,
        "events": events,
        "communication": {"latency_s": draw(st.floats(0, 0.01))},
        "exchange": {
            "every": draw(st.integers(1, 5) if every is None else every),
            "lag": draw(st.integers(1, 6)),
            "cold_lag": draw(st.none() | st.integers(1, 6)),
        },
    }
    try:
        return scenario(**values)
    except ValidationError:  # those who are there cannot share the global batch
        reject()
