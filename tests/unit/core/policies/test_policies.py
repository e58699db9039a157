"""What each policy does, case by case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.allocation.step_forecast import StepForecast
from evenstride.core.control.advance import advance
from evenstride.core.control.events import Exchanged, FleetFormed, SetShares
from evenstride.core.control.state import Control
from evenstride.core.fleet import Fleet, Shares, Worker
from evenstride.core.policies import POLICY_NAMES, policy_from_spec
from evenstride.core.policies.dynamic_batching import DynamicBatching, proportional_step
from evenstride.core.policies.static import GivenShares, Static
from evenstride.core.policy import Keep, Move
from evenstride.core.time_model.curve_update import bent
from evenstride.core.time_model.estimates import CurveEstimates, Estimate, TimeModel
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import ConfigError, InfeasibleShares, UnknownPolicy
from tests.messages import check_message, raises_message


def _workers(count: int, **facts: Any) -> tuple[Worker, ...]:
    return tuple(Worker(f"host/{rank}", **facts) for rank in range(count))


class Plant:
    """Workers with true times, driven by a policy through the real control."""

    def __init__(
        self, spec: str, batch: int, fixed_s: list[float], per_sample_s: list[float]
    ) -> None:
        self.fixed_s, self.per_sample_s = np.array(fixed_s), np.array(per_sample_s)
        self.control, instructions = advance(
            Control(policy_from_spec(spec)), FleetFormed(0, 0, batch, _workers(len(fixed_s)))
        )
        self.reasons = [i.reason for i in instructions if isinstance(i, SetShares)]
        self.step = 1

    def exchange(self, steps: int = 1) -> Shares:
        """Run some steps at the shares in force and let the policy decide."""
        shares = np.array(self.control.shares)
        times_s = self.fixed_s + self.per_sample_s * shares
        seen = tuple(
            Observation(k, int(shares[k]), self.step, (float(t),) * steps, (0.0,) * steps)
            for k, t in enumerate(times_s)
        )
        self.step += steps
        event = Exchanged(self.step, self.step, Measurements.of(seen))
        self.control, instructions = advance(self.control, event)
        self.reasons += [i.reason for i in instructions if isinstance(i, SetShares)]
        return self.control.shares

    def step_s(self) -> float:
        """Time of a step at the shares in force."""
        return float((self.fixed_s + self.per_sample_s * np.array(self.control.shares)).max())


def test_uniform_shares_are_equal_apart_from_the_remainder() -> None:
    _, move = policy_from_spec("uniform").init(Fleet(_workers(3), 11))

    assert move.shares == (4, 4, 3)


def test_uniform_shares_respect_a_memory_cap() -> None:
    workers = (Worker("a"), Worker("b", max_share=2), Worker("c"))

    _, move = policy_from_spec("uniform").init(Fleet(workers, 12))

    assert move.shares == (5, 2, 5)


@pytest.mark.parametrize(
    ("spec", "facts"), [("static", {"flops_per_s": 1e9}), ("static:cores", {"cores": 1.0})]
)
def test_static_splits_by_the_resource_and_stays(spec: str, facts: dict[str, float]) -> None:
    name, unit = next(iter(facts.items()))
    workers = tuple(Worker(str(k), **{name: f * unit}) for k, f in enumerate((9, 12, 18)))  # type: ignore[arg-type]

    _, move = policy_from_spec(spec).init(Fleet(workers, 39))

    assert move.shares == (9, 12, 18)


def test_static_without_known_resources_is_refused() -> None:
    with raises_message(ConfigError):
        Static().init(Fleet(_workers(2), 10))


@pytest.mark.parametrize(
    ("spec", "facts", "reported"),
    [
        (
            "static",
            {},
            ("flops_per_s",),
        ),
        ("static:cores", {}, ("worker b",)),
        ("static", {"cores": 4}, ("static:cores",)),
        ("static:cores", {"flops_per_s": 1e9}, ("static:flops",)),
    ],
)
def test_static_without_a_resource_names_the_worker_and_the_alternatives(
    spec: str, facts: dict[str, float], reported: tuple[str, ...]
) -> None:
    workers = (Worker("a", cores=4, flops_per_s=1e9), Worker("b", **facts))  # type: ignore[arg-type]

    with pytest.raises(ConfigError) as refusal:
        policy_from_spec(spec).init(Fleet(workers, 10))

    check_message(str(refusal.value), *reported)


def test_given_shares_are_taken_as_they_are() -> None:
    _, move = policy_from_spec("static:20,0,100").init(Fleet(_workers(3), 120))

    assert move.shares == (20, 0, 100)


@pytest.mark.parametrize(
    "shares",
    [(20, 100), (1, 2, 3), (1, 9, 110)],
)
def test_given_shares_that_do_not_fit_are_refused(shares: Shares) -> None:
    workers = (Worker("a"), Worker("b"), Worker("c", max_share=100))

    with raises_message(ConfigError):
        GivenShares(shares).init(Fleet(workers, 120))


@pytest.mark.parametrize("spec", ["static:x", "static:-1,3", "static:1,,2", "static:0,0"])
def test_a_static_specification_that_is_not_understood_is_refused(spec: str) -> None:
    with raises_message(ConfigError):
        policy_from_spec(spec)


def test_an_unknown_policy_lists_the_available_ones() -> None:
    with pytest.raises(UnknownPolicy) as error:
        policy_from_spec("magic")

    assert all(name in str(error.value) for name in POLICY_NAMES)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (
            "adaptive:0.1",
            ("'adaptive:0.1'", "'0.1'", "min_gain"),
        ),
        (
            "uniform:x=1",
            ("'uniform:x=1'", "'x=1'"),
        ),
        (
            "dynamic-batching:window=two",
            ("'two'",),
        ),
    ],
)
def test_a_setting_that_a_policy_has_not_is_refused(spec: str, complaint: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        policy_from_spec(spec)

    check_message(str(caught.value), *complaint)


def test_settings_are_changed_by_name() -> None:
    assert policy_from_spec("dynamic-batching:window=5,dead_band=0.1") == DynamicBatching(
        window=5, dead_band=0.1
    )


def test_adaptive_goes_to_the_optimum_in_two_moves_on_affine_times() -> None:
    dice, every = np.random.default_rng(0), np.ones(3, dtype=np.int64)
    over, reasons = [], []
    for _ in range(20):
        fixed_s, per_sample_s = dice.uniform(0.0, 0.06, 3), 10 ** dice.uniform(-3.0, -2.2, 3)
        plant = Plant("adaptive", 300, list(fixed_s), list(per_sample_s))
        for _ in range(8):
            plant.exchange()
        model = TimeModel.affine(fixed_s, per_sample_s)
        best_s = float(model.at(equal_finish(model, every, 300 * every, 300)).max())
        over.append(plant.step_s() / best_s)
        reasons.append(len(plant.reasons))

    assert np.mean(over) <= 1.02
    assert max(over) <= 1.06
    assert np.median(reasons) <= 3, "the opening and two moves"


def test_adaptive_leaves_equal_workers_alone() -> None:
    plant = Plant("adaptive", 128, [0.01] * 4, [0.001] * 4)

    for _ in range(10):
        plant.exchange()

    assert plant.control.shares == (32, 32, 32, 32)
    assert len(plant.reasons) == 1


def test_adaptive_follows_a_slow_down() -> None:
    plant = Plant("adaptive", 120, [0.0, 0.0], [0.001, 0.001])
    for _ in range(6):
        plant.exchange(4)

    plant.per_sample_s = np.array([0.001, 0.003])
    for _ in range(3):
        plant.exchange(4)

    assert plant.control.shares[0] == pytest.approx(90, abs=3)


@pytest.mark.parametrize("slower", [1.5, 2, 3, 4, 6])
def test_a_slow_down_of_proportional_times_is_not_taken_back_for_a_wrong_shape(
    slower: float,
) -> None:
    """With less to do the worker is faster than thought, and may seem to have recovered."""
    plant = Plant("adaptive", 120, [0.0, 0.0], [0.001, 0.001])
    for _ in range(6):
        plant.exchange(4)

    plant.per_sample_s = np.array([0.001, 0.001 * slower])
    slowest_s = [plant.step_s() for _ in range(6) if plant.exchange(4)]

    best_s = 0.120 * slower / (1 + slower)
    assert max(slowest_s) < 1.3 * best_s
    assert slowest_s[-1] < 1.03 * best_s


def test_a_worker_wrongly_regarded_as_slow_gets_samples_again() -> None:
    """Its first step was a spike, and with one sample its speed would never show."""
    plant = Plant("adaptive", 64 * 64, [0.02] * 64, [0.001] * 64)
    plant.per_sample_s[7] = 0.0036
    plant.exchange()
    plant.per_sample_s[7] = 0.001
    assert plant.control.shares[7] < 20

    for _ in range(25):
        plant.exchange()

    assert plant.control.shares[7] == pytest.approx(64, abs=3)


def test_adaptive_names_the_worker_and_the_gain() -> None:
    plant = Plant("adaptive", 100, [0.0, 0.0], [0.001, 0.004])

    plant.exchange()

    assert "host/1 finishes last" in plant.reasons[-1]
    assert "less)" in plant.reasons[-1]


def test_adaptive_waits_until_everyone_is_known() -> None:
    control, _ = advance(Control(policy_from_spec("adaptive")), FleetFormed(0, 0, 10, _workers(2)))
    seen = Observation(0, 5, 1, (0.1,), (0.0,))

    control, (verdict, *_) = advance(control, Exchanged(2, 2, Measurements.of((seen,))))

    assert "host/1 has been measured" in verdict.reason  # type: ignore[union-attr]
    assert control.shares == (5, 5)


def test_dynamic_batching_starts_open_loop() -> None:
    workers = (Worker("a", flops_per_s=1e12), Worker("b", flops_per_s=3e12))

    _, move = DynamicBatching().init(Fleet(workers, 40))

    assert move.shares == (10, 30)


def test_dynamic_batching_waits_for_its_window_then_acts_on_throughput() -> None:
    plant = Plant("dynamic-batching:window=10", 120, [0.0, 0.0], [0.001, 0.003])

    assert plant.exchange(9) == (60, 60)
    assert plant.exchange(1) == (90, 30)


def test_dynamic_batching_under_corrects_fixed_times_as_published() -> None:
    # Each step leaves about fixed / total of the error: here 0.03 / 0.09.
    plant = Plant("dynamic-batching", 120, [0.03, 0.03], [0.001, 0.001])
    plant.per_sample_s = np.array([0.001, 0.002])

    first = plant.exchange(10)
    second = plant.exchange(10)

    assert first[0] < second[0] < 80


def test_dynamic_batching_keeps_inside_its_dead_band() -> None:
    plant = Plant("dynamic-batching", 120, [0.0, 0.0], [0.001, 0.00108])

    assert plant.exchange(10) == (60, 60)
    assert plant.exchange(10) == (60, 60)


def test_dynamic_batching_learns_a_bound_from_lost_throughput() -> None:
    policy, fleet = DynamicBatching(), Fleet(_workers(2), 120)
    state, _ = policy.init(fleet)

    def decide(shares: Shares, times_s: tuple[float, float]) -> Shares:
        nonlocal state
        from evenstride.core.policy import Situation
        from evenstride.core.time_model.estimates import Estimate

        seen = tuple(
            Observation(k, shares[k], 1, (times_s[k],) * 10, (0.0,) * 10) for k in range(2)
        )
        state, decision = policy.decide(
            state, Situation(fleet, shares, 10, Measurements.of(seen), Estimate.unknown(2))
        )
        return decision.shares if isinstance(decision, Move) else shares

    grown = decide((60, 60), (0.06, 0.12))
    assert grown == (80, 40)
    decide(grown, (0.20, 0.08))  # worker 0 fell from 1000 to 400 samples a second

    assert state.learned_most.tolist() == [60, 0]


def test_dynamic_batching_ignores_times_of_another_share() -> None:
    plant = Plant("dynamic-batching", 120, [0.0, 0.0], [0.001, 0.003])
    stale = tuple(Observation(k, 7, 1, (9.0,) * 50, (0.0,) * 50) for k in range(2))

    plant.control, (verdict, *_) = advance(plant.control, Exchanged(9, 9, Measurements.of(stale)))

    assert "0 of 1 steps" in verdict.reason  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("cores", "growth"), [((9, 12, 18), 1.08), ((4, 11, 24), 1.66), ((2, 17, 20), 2.64)]
)
def test_the_papers_literal_rule_lets_the_global_batch_grow(
    cores: tuple[int, ...], growth: float
) -> None:
    after = proportional_step(np.full(3, 13.0), 13.0 / np.array(cores))

    assert float(after.sum()) / 39 == pytest.approx(growth, abs=0.005)


def test_a_batch_outside_the_bounds_is_refused_with_numbers_and_remedy() -> None:
    with pytest.raises(InfeasibleShares) as few:
        Fleet(_workers(5), 4)
    with pytest.raises(InfeasibleShares) as many:
        Fleet(_workers(2, max_share=10), 21)

    assert "global batch of 4" in str(few.value)
    assert "at least 5" in str(few.value)
    assert "accept 2 to 20" in str(many.value)
    assert "raise max_share" in str(many.value)


@pytest.mark.parametrize("facts", [{"min_share": 0}, {"min_share": 5, "max_share": 4}])
def test_impossible_bounds_of_one_worker_are_refused(facts: dict[str, Any]) -> None:
    with raises_message(ConfigError):
        Worker("w", **facts)


def test_keep_and_move_carry_their_reason() -> None:
    assert Keep("calm").reason == "calm"
    assert Move((1,), "why").reason == "why"


def test_of_a_worker_that_is_hardly_known_less_is_asked_than_its_mean_time_allows() -> None:
    """Its curve came out flat; the split in force is bad for another reason, so one is wanted."""
    fixed_s, per_sample_s = np.array([0.02] * 15 + [0.045]), np.array([0.004] * 15 + [0.001])
    curves = CurveEstimates.certain(fixed_s, per_sample_s).times(1.0, np.full(16, 1e-4))
    curves = bent(curves, np.array([64] * 15 + [1]), np.array([1e-6] * 15 + [0.9]))
    estimate = replace(Estimate.unknown(16), now=curves, steps=np.full(16, 50))
    fleet, now = Fleet(_workers(16), 1024), np.array([135] + [63] * 14 + [7])
    outlook = StepForecast(estimate, fleet)

    best, best_s = outlook.best_split(now, outlook.step_s(now))
    together = equal_finish(estimate.model, fleet.lower, fleet.upper, 1024)

    assert best_s < 0.3 * outlook.step_s(together)
    assert best[15] < 0.1 * together[15]
