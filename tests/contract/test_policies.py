"""The contract that every policy keeps, for any fleet and any reports."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.control.advance import advance
from evenstride.core.control.events import Exchanged, FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Fleet, Worker
from evenstride.core.policies import POLICY_NAMES
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.core.sampling.partition import step_shares
from evenstride.core.time_model.estimates import Estimate
from evenstride.core.time_model.kalman import learn_times
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import ConfigError, InfeasibleShares
from tests.contract.fleets import (
    SPECS,
    every_balancing_policy,
    every_policy,
    fleets,
    observations,
    policy_of,
    seconds,
    splits,
)
from tests.effort import expensive
from tests.messages import raises_message
from tests.unit.core.policies.plant import Plant


def test_the_contract_covers_every_policy() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} == set(POLICY_NAMES)


def _same(one: Any, other: Any) -> bool:
    """Return whether two states or decisions are equal to the last bit, arrays included."""
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if is_dataclass(one):
        names = [field.name for field in fields(one)]
        return type(one) is type(other) and all(
            _same(getattr(one, name), getattr(other, name)) for name in names
        )
    return bool(one == other)


def _check(decision: Decision, fleet: Fleet, *, may_leave_out: bool) -> None:
    reason = decision.reason
    assert reason and reason == reason.strip(), "a decision says why"
    assert "\n" not in reason and ". " not in reason, "in one sentence"
    if isinstance(decision, Keep):
        return
    assert type(decision.shares) is tuple
    assert {type(share) for share in decision.shares} == {int}, "not numpy's: they go into JSON"
    assert sum(decision.shares) == fleet.global_batch
    for share, low, high in zip(decision.shares, fleet.lower, fleet.upper, strict=True):
        assert low <= share <= high or (share == 0 and may_leave_out)


@every_policy
@given(data=st.data())
def test_a_policy_is_pure_and_its_shares_are_exact(spec: str, data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    policy = policy_of(spec, data.draw(splits(fleet)))
    estimate = Estimate.unknown(len(fleet))

    state, opening = policy.init(fleet)
    assert _same(policy.init(fleet), (state, opening))
    decision: Decision = opening
    for step in range(data.draw(st.integers(1, 5))):
        _check(decision, fleet, may_leave_out="GIVEN" in spec or "idle" in spec)
        shares = decision.shares if isinstance(decision, Move) else data.draw(splits(fleet))
        seen = data.draw(observations(shares))
        estimate = learn_times(estimate, Measurements.of(seen))
        measured, shared_s = Measurements.of(seen), data.draw(seconds)
        situation = Situation(fleet, shares, 1000 + step, measured, estimate, shared_s)
        before = pickle.dumps((policy, state, situation))

        following = policy.decide(state, situation)

        assert pickle.dumps((policy, state, situation)) == before, "nothing was changed in place"
        copied, copied_state, copied_situation = pickle.loads(before)
        again = policy.decide(state, situation)
        assert _same(copied.decide(copied_state, copied_situation), following), "its input counts"
        assert _same(again, following), "nothing was remembered elsewhere"
        state, decision = following
    _check(decision, fleet, may_leave_out="GIVEN" in spec or "idle" in spec)


@every_policy
@given(data=st.data())
def test_a_tail_never_gives_a_worker_more_than_its_share(spec: str, data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    _, move = policy_of(spec, data.draw(splits(fleet))).init(fleet)
    size = data.draw(st.integers(1, fleet.global_batch))

    tail = step_shares(move.shares, size)

    assert sum(tail) == size
    assert all(part <= share for part, share in zip(tail, move.shares, strict=True))


@every_policy
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_opening_is_short_and_never_waits_for_a_lone_worker(spec: str, count: int) -> None:
    policy = policy_of(spec, (12 // count,) * count)
    members = tuple(Worker(f"host/{k}", cores=1, flops_per_s=1e9) for k in range(count))

    control, _ = advance(Control(policy), FleetFormed(0, 0, 12, members))

    assert 0 <= policy.opening_steps <= 8
    assert control.opening_left == (policy.opening_steps if count > 1 else 0)


def _running(spec: str) -> Control:
    members = tuple(Worker(f"host/{k}", cores=k + 1.0, flops_per_s=1e9) for k in range(2))
    control, _ = advance(Control(policy_of(spec, (5, 7))), FleetFormed(0, 0, 12, members))
    seen = tuple(
        Observation(k, control.shares[k], 1, (0.1 + k,) * 12, (0.0,) * 12) for k in range(2)
    )
    return advance(control, Exchanged(12, 13, Measurements.of(seen)))[0]


@every_policy
@pytest.mark.parametrize(
    ("members", "batch"),
    [
        ((Worker("a", min_share=5), Worker("b", min_share=5)), 9),
        ((Worker("a", max_share=5), Worker("b", max_share=5)), 11),
    ],
)
def test_a_refused_fleet_leaves_a_running_control_as_it_was(
    spec: str, members: tuple[Worker, ...], batch: int
) -> None:
    control = _running(spec)
    before = pickle.dumps(control)
    seen = tuple(Observation(k, 6, 14, (0.2,) * 12, (0.0,) * 12) for k in range(2))

    with raises_message(InfeasibleShares, batch):
        advance(control, FleetFormed(1, 20, batch, members))

    assert pickle.dumps(control) == before
    following, untroubled = (
        advance(one, Exchanged(30, 31, Measurements.of(seen))) for one in (control, _running(spec))
    )
    assert following[1] == untroubled[1], "it decides on as if it had not been asked"


@pytest.mark.parametrize("spec", ["static", "static:cores", "static:GIVEN"])
def test_a_fleet_that_a_fixed_policy_cannot_serve_leaves_a_running_control_as_it_was(
    spec: str,
) -> None:
    control = _running(spec)
    before = pickle.dumps(control)

    with pytest.raises(ConfigError):
        advance(control, FleetFormed(1, 20, 13, (Worker("a"), Worker("b"))))

    assert pickle.dumps(control) == before


@every_policy
@given(busy_s=seconds, steps=st.integers(1, 30), batch=st.integers(1, 50))
def test_a_lone_worker_keeps_the_whole_batch(
    spec: str, busy_s: float, steps: int, batch: int
) -> None:
    control, _ = advance(
        Control(policy_of(spec, (batch,))),
        FleetFormed(0, 0, batch, (Worker("only", cores=1, flops_per_s=1e9),)),
    )
    seen = Observation(0, batch, 0, (busy_s,) * steps, (0.0,) * steps)

    for step in range(3):
        control, _ = advance(control, Exchanged(step, step + 1, Measurements.of((seen,))))

    assert control.shares == (batch,)


@pytest.mark.parametrize("spec", [*SPECS, "static:0,12"])
def test_exchanges_of_a_steady_run_are_rare(spec: str) -> None:
    members = tuple(Worker(f"host/{k}", cores=1, flops_per_s=1e9) for k in range(2))
    control, _ = advance(Control(policy_of(spec, (6, 6))), FleetFormed(0, 0, 12, members))

    for step in range(4, 200, 4):
        seen = tuple(
            Observation(k, share, step - 4, (0.01,) * 4, (0.001,) * 4, modelled=share > 0)
            for k, share in enumerate(control.shares)
        )
        control, verdict = advance(control, Exchanged(step, step + 1, Measurements.of(seen)))

    assert verdict.exchange_after >= 100, "steps of 10 ms, exchanged every few seconds"


def _declared(speeds: Sequence[float], **bounds: Any) -> tuple[Worker, ...]:
    """Return workers that declare their speeds."""
    return tuple(
        Worker(f"host/{k}", cores=speed, flops_per_s=1e9 * speed, **bounds)
        for k, speed in enumerate(speeds)
    )


def _equal(spec: str, count: int, lag: int = 1) -> Plant:
    given = spec.replace("GIVEN", ",".join(["16"] * count))
    members = _declared([1.0] * count)
    return Plant(given, 16 * count, [0.02] * count, [0.001] * count, lag=lag, members=members)


@every_policy
@pytest.mark.parametrize("lag", [1, 3])
def test_equal_workers_end_equal_and_stay_so(spec: str, lag: int) -> None:
    plant = _equal(spec, 4, lag)

    plant.run(60)
    settled = len(plant.reasons)
    plant.run(60)

    assert plant.control.shares == (16, 16, 16, 16)
    assert len(plant.reasons) == settled


@every_policy
@expensive
@given(octaves=st.lists(st.integers(0, 4), min_size=2, max_size=4), fixed_ms=st.integers(0, 40))
def test_a_faster_worker_never_gets_less(spec: str, octaves: list[int], fixed_ms: int) -> None:
    if spec == "static:GIVEN":
        return  # given shares may be any
    speeds = [2.0**octave for octave in octaves]
    count = len(speeds)
    per_sample_s = [0.008 / speed for speed in speeds]
    fixed_s = [fixed_ms / 1e3] * count
    plant = Plant(spec, 60 * count, fixed_s, per_sample_s, members=_declared(speeds))

    plant.run(30, steps=5)

    for one, share in zip(speeds, plant.control.shares, strict=True):
        for other, others in zip(speeds, plant.control.shares, strict=True):
            assert one <= other or share >= others, (speeds, plant.control.shares)


@every_balancing_policy
@pytest.mark.parametrize(("lag", "steps"), [(1, 1), (8, 1), (32, 1), (3, 4), (1, 50), (32, 50)])
def test_late_decisions_do_not_make_it_swing(spec: str, lag: int, steps: int) -> None:
    slack = 1.35 if "omnilearn" in spec else 1.1  # its dead-band alone is 20 % of a share
    plant = Plant(spec, 240, [0.01, 0.02, 0.03], [0.001, 0.002, 0.003], lag=lag)

    # Who moves one sample at a time, and waits for its effect, needs as many more exchanges.
    plant.run({1: max(200, 10 * lag), 4: 60, 50: 20}[steps], steps)
    later = [plant.exchange(steps) for _ in range(12)]

    assert plant.step_s() < slack * plant.best_s()
    assert all(abs(a - b) <= 8 for shares in later for a, b in zip(shares, later[0], strict=True))


@every_policy
def test_workers_may_leave_and_join(spec: str) -> None:
    if spec == "static:GIVEN":
        return  # the shares are given for one number of workers
    plant = Plant(spec, 120, [0.01] * 3, [0.001, 0.002, 0.004], members=_declared([4, 2, 1]))
    plant.run(30)

    for count in (2, 5, 1, 3):
        plant.fixed_s = np.full(count, 0.01)
        plant.per_sample_s = np.array([0.004, 0.001, 0.002, 0.003, 0.002])[:count]
        plant.form(_declared((1 / plant.per_sample_s).tolist()))
        plant.run(30)

        assert len(plant.control.shares) == count
        assert sum(plant.control.shares) == 120
        assert min(plant.control.shares) >= 1


ABSURD = (0.0, -0.0, -1.0, float("inf"), float("-inf"), float("nan"), 5e-324, 1e-300, 1e300)
# One of each class: no time at all, a negative one, endless, none, too small or large to count.
CLASSES_OF_ABSURD = (0.0, -1.0, float("inf"), float("nan"), 5e-324, 1e300)


@every_policy
@expensive
@given(data=st.data())
def test_absurd_times_lead_to_no_absurd_shares(spec: str, data: st.DataObject) -> None:
    plant = _equal(spec, 3)
    time_s = st.sampled_from(ABSURD) | seconds
    for _ in range(data.draw(st.integers(1, 6))):
        plant.step += 4
        reported = [
            Observation(
                *(k, share, plant.step - 4),
                tuple(data.draw(st.lists(time_s, min_size=4, max_size=4))),
                tuple(data.draw(st.lists(time_s, min_size=4, max_size=4))),
                cpu_load=data.draw(time_s),
                memory_load=data.draw(time_s),
            )
            for k, share in enumerate(plant.control.shares)
        ]

        shares = plant.tell(reported)

        assert sum(shares) == 48
        assert min(shares) >= 1
    plant.run(10, steps=8)
    assert sum(plant.control.shares) == 48


@every_policy
@pytest.mark.parametrize("absurd_s", CLASSES_OF_ABSURD)
def test_the_split_recovers_from_an_absurd_time(spec: str, absurd_s: float) -> None:
    slack = 1.25 if "omnilearn" in spec else 1.06  # inside a dead-band it may stay
    plant = _equal(spec, 3)
    plant.run(30)

    plant.tell([Observation(1, plant.control.shares[1], plant.step, (absurd_s,), (0.0,))])
    plant.run(60, steps=2)

    assert plant.step_s() < slack * plant.best_s()
