"""Alerts: none by noise alone, one within so many steps of a slow-down, once per episode."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.diagnostics.debounce import WHILE_S, WHILE_STEPS, DebouncedStates, Span
from evenstride.core.diagnostics.redundant_workers import best_s, unneeded
from evenstride.core.fleet import Fleet, Worker
from evenstride.core.time_model.step_times import TimeModel
from tests.unit.sim.watched import watched, worker

# After a slow-down: the while that it must last, what an exchange may come later than that, and
# what it takes to be sure that it is no spike.
NAMED_WITHIN = 150

fleets = st.lists(
    st.tuples(st.floats(0, 0.5), st.floats(0.0005, 0.02), st.integers(1, 3)), min_size=2, max_size=6
)


@given(
    count=st.integers(1, 4),
    noise=st.floats(0, 0.2),
    spike_rate=st.floats(0, 0.1),
    other=st.floats(0.4, 1.0),
    seed=st.integers(0, 1000),
)
def test_noise_alone_names_nobody(
    count: int, noise: float, spike_rate: float, other: float, seed: int
) -> None:
    usual = {"noise": noise, "spike_rate": spike_rate}
    workers = [
        worker("n", count=count, **usual),
        worker("m", count=count, samples_per_s=1000.0 * other, **usual),
    ]

    assert not watched(workers, 800, batch=128 * count, seed=seed).found


@given(
    speed=st.floats(0.2, 0.6),
    at=st.integers(150, 400),
    noise=st.floats(0, 0.1),
    policy=st.sampled_from(["adaptive", "uniform", "lb-bsp-gpu"]),
    seed=st.integers(0, 1000),
)
def test_a_slow_down_is_named_once_and_soon(
    speed: float, at: int, noise: float, policy: str, seed: int
) -> None:
    events = [{"kind": "step", "at": at, "workers": 2, "speed": speed}]

    run = watched([worker(count=4, noise=noise)], at + 400, events, policy=policy, seed=seed)

    (alert,) = [alert for alert in run.found if alert.kind == "slow"]
    assert alert.worker == "n/2"
    assert at + WHILE_STEPS <= alert.step <= at + NAMED_WITHIN
    assert at - 2 <= alert.since <= at + 8
    assert alert.speed == pytest.approx(speed, rel=0.15)


@given(
    episodes=st.integers(1, 3),
    speed=st.floats(0.2, 0.6),
    noise=st.floats(0, 0.05),
    seed=st.integers(0, 1000),
)
def test_each_episode_is_named_exactly_once(
    episodes: int, speed: float, noise: float, seed: int
) -> None:
    events = [
        {"kind": "step", "at": at, "workers": 0, "speed": change}
        for number in range(episodes)
        for at, change in ((300 + 600 * number, speed), (600 + 600 * number, 1 / speed))
    ]

    found = watched([worker(count=3, noise=noise)], 300 + 600 * episodes, events, seed=seed).found

    assert len([a for a in found if (a.kind, a.worker) == ("slow", "n/0")]) == episodes
    assert not [a for a in found if a.worker != "n/0"]


@given(fleets, st.integers(20, 400))
def test_who_is_not_worth_its_place_is_found_by_trying(
    workers: list[tuple[float, float, int]], batch: int
) -> None:
    fixed, per_sample, least = zip(*workers, strict=True)
    times = TimeModel.affine(list(fixed), list(per_sample))
    fleet = Fleet(tuple(Worker(str(k), min_share=n) for k, n in enumerate(least)), batch)

    out = unneeded(times, fleet, np.ones(len(fleet)))

    everybody, alone = best_s(times, fleet), best_s(times, fleet, without=out)
    assert everybody is not None
    assert alone is not None
    assert alone <= everybody, "the others alone are at least as fast"
    if not out.any():
        for k in range(len(fleet)):
            without = best_s(times, fleet, without=np.arange(len(fleet)) == k)
            assert without is not None
            assert without >= everybody, "and nobody was missed"


looks = st.lists(
    st.tuples(
        st.sampled_from(["bad", "between", "good"]), st.integers(0, 40), st.floats(0.01, 0.3)
    ),
    max_size=30,
)


@given(looks)
def test_episodes_are_those_of_a_plain_count(told: list[tuple[str, int, float]]) -> None:
    episodes, step = DebouncedStates.none(1), 0
    is_open, steps, lasted_s = False, 0, 0.0
    for state, count, step_s in told:
        span = Span(np.array([float(count)]), np.array([count * step_s]), np.array([step]))
        bad, good = np.array([state == "bad"]), np.array([state == "good"])

        episodes, begun = episodes.after(bad, good, span, span)
        step += count

        if count:
            holds = state == ("good" if is_open else "bad")
            steps, lasted_s = (steps + count, lasted_s + count * step_s) if holds else (0, 0.0)
        turned = steps >= WHILE_STEPS and lasted_s >= WHILE_S and bool(count)
        assert begun.tolist() == [turned and not is_open]
        if turned:
            is_open, steps, lasted_s = not is_open, 0, 0.0
        assert episodes.open.tolist() == [is_open]
