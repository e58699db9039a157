"""Whole micro-batches, case by case."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evenstride.core.allocation.integer_splits import common_quantum, equal_finish, in_quanta
from evenstride.core.allocation.step_forecast import StepForecast
from evenstride.core.control.advance import advance
from evenstride.core.control.events import Event, Exchanged, FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Fleet, FloatArray, IntArray, Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.estimates import CurveEstimates, Estimate, TimeModel
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import ConfigError, InfeasibleShares, from_plain, to_plain
from evenstride.trace.codec import TraceWriter, decode, encode
from evenstride.trace.decision_replay import replay
from tests.messages import raises_message

LARGE, SMALL = Worker("large", quantum=32), Worker("small", max_share=48, quantum=12)


def _ones(count: int) -> IntArray:
    return np.ones(count, np.int64)


@pytest.mark.parametrize("quantum", [0, -8])
def test_a_quantum_is_at_least_one(quantum: int) -> None:
    with raises_message(ConfigError, quantum):
        Worker("host/0", quantum=quantum)


def test_a_fleet_knows_the_quanta_of_its_workers() -> None:
    fleet = Fleet((LARGE, SMALL, Worker("any")), 128)

    assert fleet.quanta.tolist() == [32, 12, 1]
    assert fleet.quanta.dtype == np.int64
    assert common_quantum(fleet.quanta) == 0
    assert common_quantum(np.array([8, 8])) == common_quantum(8) == 8
    with pytest.raises(ValueError, match="read-only"):
        fleet.quanta[0] = 1


def test_a_larger_card_takes_larger_micro_batches() -> None:
    fleet = Fleet((LARGE, SMALL), 128)
    twice_as_slow = TimeModel.affine([0.0, 0.0], [0.001, 0.002])

    split = equal_finish(twice_as_slow, fleet.lower, fleet.upper, 128, quantum=fleet.quanta)

    # In ones it would be 85 and 43. The large one takes the rest, 28 beyond 64.
    assert split.tolist() == [92, 36]


def test_no_rest_is_preferred_where_it_costs_no_time() -> None:
    # Whatever it does, the third worker ends last. The first two end in time with 32 and 24 of 56.
    model = TimeModel.affine([0.0, 0.0, 9.0], [0.01, 0.01, 0.01])
    quanta = np.array([32, 12, 8])

    split = equal_finish(model, _ones(3), np.full(3, 64), 64, quantum=quanta)

    assert split.tolist() == [32, 24, 8]


def test_no_rest_is_preferred_even_where_it_costs_time() -> None:
    model = TimeModel.affine([0.0, 0.0], [0.01, 0.01])

    split = equal_finish(model, _ones(2), np.full(2, 64), 72, quantum=np.array([24, 12]))

    assert sorted(split.tolist()) == [24, 48]  # and not 36 and 36


def test_the_remainder_goes_to_the_worker_that_finishes_it_first() -> None:
    # At 1.6 s the first ends its second 8. By then the second has 21 beyond 32, the third 24
    # beyond 40, and 20 are left: they end at 1.56 s and at 1.5 s.
    model = TimeModel.affine([0.0] * 3, [0.1, 0.03, 0.025])

    split = equal_finish(model, _ones(3), np.full(3, 99), 108, quantum=np.array([8, 32, 40]))

    assert split.tolist() == [16, 32, 60]


def test_units_that_end_together_go_to_the_smaller_shares() -> None:
    # The first 500 samples of every worker end at the floor, so any split ends as early.
    model = TimeModel(np.zeros(3), np.full(3, 0.002), np.ones(3), np.ones(3))

    split = equal_finish(model, _ones(3), np.full(3, 500), 576, quantum=np.array([32, 12, 16]))

    assert split.tolist() == [192, 192, 192]


def test_the_remainder_goes_to_a_worker_with_room_for_it() -> None:
    # Each has room for 4 beyond a multiple, if it leaves out one: the slow one must.
    model = TimeModel.affine([0.0, 0.0], [0.1, 0.01])

    split = equal_finish(model, _ones(2), np.array([16, 24]), 36, quantum=8)

    assert split.tolist() == [12, 24]


def test_a_worker_with_a_lower_bound_of_0_may_get_no_samples() -> None:
    lower, upper, quanta = np.array([0, 1, 1]), np.array([0, 96, 96]), np.array([32, 12, 12])

    split = equal_finish(TimeModel.affine([0.0] * 3, [0.1] * 3), lower, upper, 60, quantum=quanta)

    assert sorted(split.tolist()) == [0, 24, 36]
    assert in_quanta(np.array([0, 31, 29]), lower, upper, quanta).tolist() == [0, 36, 24]


def test_a_left_out_worker_gets_no_samples_for_the_others_multiples() -> None:
    workers = tuple(Worker(str(k), max_share=n, quantum=8) for k, n in enumerate((32, 20, 12)))

    with raises_message(InfeasibleShares, "16", "28"):
        advance(Control(policy_from_spec("static:0,20,12")), FleetFormed(0, 0, 32, workers))


def test_adaptive_looks_for_its_split_among_the_multiples() -> None:
    curves = CurveEstimates.certain(np.array([0.0, 0.0]), np.array([0.001, 0.0021]))
    estimate = replace(Estimate.unknown(2), now=curves, steps=np.full(2, 50))
    outlook = StepForecast(estimate, Fleet((LARGE, SMALL), 128))

    best, best_s = outlook.best_split(np.array([64, 64]), outlook.step_s(np.array([64, 64])))

    assert best.tolist() == [92, 36]
    assert best_s == pytest.approx(0.092)


def test_ten_thousand_workers_keep_their_quanta() -> None:
    rng = np.random.default_rng(0)
    model = TimeModel.affine(rng.random(10_000) * 0.01, rng.random(10_000) * 0.002 + 1e-4)
    quanta, most = np.array([32, 12, 8, 24])[np.arange(10_000) % 4], np.full(10_000, 10**6)

    split = equal_finish(model, _ones(10_000), most, 1_850_001, quantum=quanta)

    makespan_s = model.makespan_s(split)
    assert split.sum() == 1_850_001
    assert np.count_nonzero(split % quanta) == 1
    # By any earlier instant, no choice of who takes the rest is enough.
    ended = np.maximum(model.capacity(np.nextafter(makespan_s, 0.0)), quanta)
    assert (ended - ended % quanta).sum() + (ended % quanta).max() < 1_850_001


def test_curves_that_contradict_themselves_come_to_an_end() -> None:
    class Contradicting:
        """A capacity that is one short of what `at` says."""

        def at(self, shares: IntArray) -> FloatArray:
            return np.asarray(0.1 * shares)

        def capacity(self, deadline_s: float) -> IntArray:
            return np.full(2, max(int(deadline_s / 0.1) - 1, 0))

    split = equal_finish(Contradicting(), _ones(2), np.full(2, 90), 61, quantum=np.array([8, 5]))

    assert split.sum() == 61
    assert np.count_nonzero(split % np.array([8, 5])) <= 1


@pytest.mark.parametrize(
    ("upper", "total", "says"),
    [
        ([60, 60], 130, ("130 samples", "2 workers", "44")),
        ([64, 64], 40, ("44", "12", "32")),
        ([64, 11], 60, ("12", "32", "worker 1")),
        ([30, 30], 30, ("44", "12", "32")),
        ([20, 30], 30, ("max_share", "32", "44")),
    ],
)  # fmt: skip
def test_a_refusal_names_the_quanta(upper: list[int], total: int, says: tuple[str, ...]) -> None:
    quanta, most = np.array([32, 12]), np.array(upper)
    model = TimeModel.affine([0.0] * 2, [0.1] * 2)

    with raises_message(InfeasibleShares, *says):
        in_quanta(np.array([total - 20, 20]), _ones(2), most, quanta)
    with raises_message(InfeasibleShares, *says) as refusal:
        equal_finish(model, _ones(2), most, total, quantum=quanta)
    for again in (
        pickle.loads(pickle.dumps(refusal.value)),
        from_plain(json.loads(json.dumps(to_plain(refusal.value)))),
    ):
        assert str(again) == str(refusal.value)


def test_many_quanta_are_not_all_named() -> None:
    quanta = np.array([7, 11, 13, 17, 19])

    with raises_message(InfeasibleShares):
        in_quanta(_ones(5), _ones(5), np.full(5, 99), quanta)


def test_an_event_of_a_version_without_quanta_is_read() -> None:
    workers = Worker("one/0", quantum=1), Worker("one/1", max_share=48, quantum=1)
    formed = FleetFormed(0, 0, 64, workers)
    plain = encode(formed)
    assert [worker.pop("quantum") for worker in plain["workers"]] == [1, 1]

    assert decode(plain) == formed


def test_quanta_are_in_the_trace_and_are_replayed(tmp_path: Path) -> None:
    path, control = tmp_path / "trace.jsonl", Control(policy_from_spec("adaptive"))
    seen = [Observation(k, n, 2, (0.05 + 0.05 * k,) * 3, (0.0,) * 3) for k, n in ((0, 92), (1, 36))]
    events: list[Event] = [
        FleetFormed(0, 0, 128, (LARGE, SMALL)),
        Exchanged(5, 6, Measurements.of(seen)),
    ]

    with TraceWriter(path, {"policy": "adaptive"}) as writer:
        for event in events:
            control, instructions = advance(control, event)
            writer.event(0.0, event, instructions)

    assert sum(share % q > 0 for share, q in zip(control.shares, (32, 12), strict=True)) <= 1
    assert replay(path).identical
    lines = path.read_text()
    path.write_text(
        lines.replace('"quantum":12', '"quantum":1').replace('"quantum":32', '"quantum":1')
    )
    assert not replay(path).identical
