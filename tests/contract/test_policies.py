"""The contract that every policy keeps, whatever fleet it meets and whatever it is told."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstride.core.allocation import apportion
from evenstride.core.control import Control, ExchangeAfter, Exchanged, FleetFormed, advance
from evenstride.core.estimation import Estimate
from evenstride.core.fleet import Fleet, Shares, Worker, as_shares
from evenstride.core.observation import Measured, Observation
from evenstride.core.partition import step_shares
from evenstride.core.policies import POLICY_NAMES, policy_from_spec
from evenstride.core.policy import Decision, Keep, Move, Policy, Situation
from evenstride.errors import ConfigError, InfeasibleShares

SPECS = ("uniform", "static", "static:cores", "static:GIVEN", "dynamic-batching", "adaptive")
every_policy = pytest.mark.parametrize("spec", SPECS)

seconds = st.floats(1e-7, 10.0).map(lambda s: round(s, 7))


def test_the_contract_covers_every_policy_there_is() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} == set(POLICY_NAMES)


@st.composite
def workers(draw: st.DrawFn) -> tuple[Worker, ...]:
    found = []
    for rank in range(draw(st.integers(1, 5))):
        least = draw(st.integers(1, 4))
        found.append(
            Worker(
                f"host/{rank}",
                min_share=least,
                max_share=draw(st.none() | st.integers(least, 60)),
                cores=draw(st.floats(0.1, 128)),
                flops_per_s=draw(st.floats(1e6, 1e15)),
            )
        )
    return tuple(found)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    members = draw(workers())
    least = sum(w.min_share for w in members)
    most = sum(60 if w.max_share is None else w.max_share for w in members)
    return Fleet(members, draw(st.integers(least, most)))


@st.composite
def splits(draw: st.DrawFn, fleet: Fleet) -> Shares:
    """Return shares inside the bounds, in which some workers may be left out."""
    weights = np.array(draw(st.lists(st.integers(1, 9), min_size=len(fleet), max_size=len(fleet))))
    out = np.array(draw(st.lists(st.booleans(), min_size=len(fleet), max_size=len(fleet))))
    lower, upper = np.where(out, 0, fleet.lower), np.where(out, 0, fleet.upper)
    if not int(lower.sum()) <= fleet.global_batch <= int(upper.sum()):
        lower, upper = fleet.lower, fleet.upper
    return as_shares(apportion(weights.astype(np.float64), fleet.global_batch, lower, upper))


@st.composite
def observations(draw: st.DrawFn, shares: Shares) -> tuple[Observation, ...]:
    """Return what the workers may report: the split in force, an older one, tails and ghosts."""
    thorough = draw(st.booleans())  # everyone tells at length about the split in force
    told = []
    for worker, share in enumerate(shares):
        for _ in range(1 if thorough else draw(st.sampled_from([1, 0, 2]))):
            seen = share if thorough else draw(st.just(0) | st.integers(0, sum(shares)))
            busy_s = tuple(draw(st.lists(seconds, min_size=1, max_size=3)))
            busy_s *= 12 if thorough else 1
            first_step, modelled = draw(st.integers(0, 999)), thorough or draw(st.booleans())
            told.append(
                Observation(
                    worker, seen, first_step, busy_s, (0.0,) * len(busy_s), modelled=modelled
                )
            )
    return tuple(told)


def _policy(spec: str, given_shares: Shares) -> Policy[Any]:
    return policy_from_spec(spec.replace("GIVEN", ",".join(map(str, given_shares))))


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
    policy = _policy(spec, data.draw(splits(fleet)))
    estimate = Estimate.unknown(len(fleet))

    state, opening = policy.init(fleet)
    assert _same(policy.init(fleet), (state, opening))
    decision: Decision = opening
    for step in range(data.draw(st.integers(1, 5))):
        _check(decision, fleet, may_leave_out="GIVEN" in spec)
        shares = decision.shares if isinstance(decision, Move) else data.draw(splits(fleet))
        seen = data.draw(observations(shares))
        estimate = estimate.learn(Measured.of(seen))
        situation = Situation(fleet, shares, step, Measured.of(seen), estimate, data.draw(seconds))
        before = pickle.dumps((policy, state, situation))

        following = policy.decide(state, situation)

        assert pickle.dumps((policy, state, situation)) == before, "nothing was changed in place"
        copied, copied_state, copied_situation = pickle.loads(before)
        again = policy.decide(state, situation)
        assert _same(copied.decide(copied_state, copied_situation), following), "its input counts"
        assert _same(again, following), "nothing was remembered elsewhere"
        state, decision = following
    _check(decision, fleet, may_leave_out="GIVEN" in spec)


@settings(max_examples=50)
@every_policy
@given(data=st.data())
def test_a_tail_never_gives_a_worker_more_than_its_share(spec: str, data: st.DataObject) -> None:
    fleet = data.draw(fleets())
    _, move = _policy(spec, data.draw(splits(fleet))).init(fleet)
    size = data.draw(st.integers(1, fleet.global_batch))

    tail = step_shares(move.shares, size)

    assert sum(tail) == size
    assert all(part <= share for part, share in zip(tail, move.shares, strict=True))


@every_policy
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_opening_is_short_and_never_waits_for_a_lone_worker(spec: str, count: int) -> None:
    policy = _policy(spec, (12 // count,) * count)
    members = tuple(Worker(f"host/{k}", cores=1, flops_per_s=1e9) for k in range(count))

    control, _ = advance(Control(policy), FleetFormed(0, 0, 12, members))

    assert 0 <= policy.opening_steps <= 8
    assert control.opening_left == (policy.opening_steps if count > 1 else 0)


def _running(spec: str) -> Control:
    members = tuple(Worker(f"host/{k}", cores=k + 1.0, flops_per_s=1e9) for k in range(2))
    control, _ = advance(Control(_policy(spec, (5, 7))), FleetFormed(0, 0, 12, members))
    seen = tuple(
        Observation(k, control.shares[k], 1, (0.1 + k,) * 12, (0.0,) * 12) for k in range(2)
    )
    return advance(control, Exchanged(12, 13, Measured.of(seen)))[0]


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

    with pytest.raises(InfeasibleShares, match=f"a global batch of {batch} samples"):
        advance(control, FleetFormed(1, 20, batch, members))

    assert pickle.dumps(control) == before
    following, untroubled = (
        advance(one, Exchanged(30, 31, Measured.of(seen))) for one in (control, _running(spec))
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


@settings(max_examples=30)
@every_policy
@given(busy_s=seconds, steps=st.integers(1, 30), batch=st.integers(1, 50))
def test_a_lone_worker_keeps_the_whole_batch(
    spec: str, busy_s: float, steps: int, batch: int
) -> None:
    control, _ = advance(
        Control(_policy(spec, (batch,))),
        FleetFormed(0, 0, batch, (Worker("only", cores=1, flops_per_s=1e9),)),
    )
    seen = Observation(0, batch, 0, (busy_s,) * steps, (0.0,) * steps)

    for step in range(3):
        control, _ = advance(control, Exchanged(step, step + 1, Measured.of((seen,))))

    assert control.shares == (batch,)


@pytest.mark.parametrize("spec", [*SPECS, "static:0,12"])
def test_a_calm_run_is_exchanged_seldom(spec: str) -> None:
    members = tuple(Worker(f"host/{k}", cores=1, flops_per_s=1e9) for k in range(2))
    control, _ = advance(Control(_policy(spec, (6, 6))), FleetFormed(0, 0, 12, members))

    for step in range(4, 200, 4):
        seen = tuple(
            Observation(k, share, step - 4, (0.01,) * 4, (0.001,) * 4, modelled=share > 0)
            for k, share in enumerate(control.shares)
        )
        control, instructions = advance(control, Exchanged(step, step + 1, Measured.of(seen)))

    after = instructions[-1]
    assert isinstance(after, ExchangeAfter)
    assert after.steps >= 100, "steps of 10 ms, exchanged every few seconds"
