"""The leader at a turn: all stand there, or somebody has gone on, or they are on their way."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from evenstride.core.control.events import EpochEnded, FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Shares, Worker
from evenstride.core.gradients.noise_scale import GradientNorms, NoiseEstimate, NoiseOfRun
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import SplitDiverged
from evenstride.runtime.coordination.draw_barrier import BatchChange
from evenstride.runtime.coordination.leader import Leader, Reply
from evenstride.runtime.coordination.side_agreements import asked, meeting
from tests.messages import raises_message

HERE = BatchChange(8, None, 1000)
RESTORED = BatchChange(8, 16, 1000)


def _noise() -> NoiseEstimate:
    estimate = NoiseEstimate()
    for more in (0.9, 1.0, 1.1, 1.0):
        estimate = estimate.after(GradientNorms(2, 64.0, 3.0 * more, 2.0))
    return estimate


def test_a_turn_is_one_when_all_stand_there() -> None:
    assert meeting([HERE, HERE], [8, 8]) == (HERE, HERE)
    assert meeting([None, None], [7, 8]) is None
    assert meeting([HERE, None], [8, 8]) is None, "the other one comes"
    assert meeting([HERE, None], [8, 7]) is None


def test_a_rank_that_has_drawn_the_next_step_will_not_wait() -> None:
    assert meeting([HERE, None, HERE], [8, 9, 8]) == (HERE, None, HERE)
    assert asked((HERE, None, HERE), 8, 16, (16, 64), _noise()) is None


def test_ranks_that_need_different_batches_are_refused() -> None:
    restored = BatchChange(8, 32, 1000)

    with raises_message(SplitDiverged, "rank 0", "8 steps", "rank 1"):
        meeting([HERE, restored], [8, 8])
    with raises_message(SplitDiverged, "8 steps", "9 steps"):
        meeting([HERE, BatchChange(9, None, 1000)], [8, 9])
    with raises_message(SplitDiverged, "rank 0", "32", "rank 1"):
        meeting([restored, None], [8, 9])


def test_the_core_decides_with_all_known_facts() -> None:
    scale = _noise().scale()
    assert scale.high < inf

    found = asked((HERE, HERE), 7, 16, (16, 64), _noise())

    assert found == EpochEnded(7, 8, 16, 64, scale.value, scale.low, scale.high)
    assert asked((HERE,), 8, 16, (16, 64), NoiseEstimate()) == EpochEnded(8, 8, 16, 64)


def test_no_batch_is_larger_than_an_epoch_nor_smaller_than_its_bound() -> None:
    def high(most: int) -> int:
        found = asked((HERE, BatchChange(8, None, most)), 8, 16, (16, 64), _noise())
        assert found is not None and found.low == 16
        return found.high

    assert (high(1000), high(40), high(9)) == (64, 40, 16)


def test_a_batch_that_is_needed_and_in_force_is_no_event() -> None:
    needed = BatchChange(8, 32, 1000)

    assert asked((needed, needed), 8, 32, (16, 64), _noise()) is None
    assert asked((needed, needed), 8, 16, None, _noise()) == EpochEnded(8, 8, 32, 32)


def test_noise_in_other_units_than_samples_chooses_nothing() -> None:
    tokens = BatchChange(8, None, 1000, weighted=True)

    assert asked((HERE, tokens), 8, 16, (16, 64), _noise()) == EpochEnded(8, 8, 16, 64)


def _leader() -> Leader:
    """Return the leader of two workers whose steps hardly depend on their samples."""
    leader = Leader(Control(policy_from_spec("adaptive")))
    leader.bounds = (16, 64)
    leader.form(FleetFormed(0, 0, 16, (Worker("one/0"), Worker("two/1"))))
    leader.skip_opening(0)
    for step, share in enumerate((2, 8, 5, 14)):
        leader.exchange(
            step, [_reply(rank, None, step, step + 1, abs(16 * rank - share)) for rank in (0, 1)], 5
        )
    leader.noise = NoiseOfRun(_noise(), 4)
    return leader


def _reply(
    rank: int, turn: BatchChange | None, drawn: int = 8, barrier: int = 8, share: int = 8
) -> Reply:
    seen = Observation(rank, share, barrier, (0.1 + 0.0001 * share,) * 4, (0.0,) * 4)
    return Reply(barrier, 5, ((0, 0, 0),), Measurements.of([seen]), drawn=drawn, turn=turn)


def test_all_go_on_with_the_batch_that_the_core_chose() -> None:
    leader = _leader()

    verdict = leader.exchange(8, [_reply(0, HERE), _reply(1, HERE)], 5)

    assert verdict.effective == 8 and verdict.batch is not None and 16 < verdict.batch <= 32
    assert verdict.shares is not None and sum(verdict.shares) == verdict.batch
    assert leader.control.fleet is not None
    assert leader.control.fleet.global_batch == verdict.batch
    assert verdict.reason.startswith("global batch 16 -> ")


def test_while_some_ranks_are_behind_no_batch_is_chosen() -> None:
    verdict = _leader().exchange(7, [_reply(0, HERE), _reply(1, None, 7, 8)], 5)

    assert verdict.batch is None


def test_a_rank_that_has_gone_on_keeps_the_batch_for_all() -> None:
    verdict = _leader().exchange(8, [_reply(0, HERE), _reply(1, None, 9, 10)], 5)

    assert verdict.batch == 16


def test_an_epoch_is_over_when_all_ranks_are_at_its_end() -> None:
    leader = Leader(Control(policy_from_spec("dbs")))
    leader.form(FleetFormed(0, 0, 16, (Worker("one/0"), Worker("two/1"))))
    # The second worker takes three times as long.
    seen = Measurements.of([Observation(1, 8, 7, (0.3024,), (0.0,))])

    def split(*turns: BatchChange | None) -> Shares | None:
        replies = [_reply(0, turns[0]), replace(_reply(1, turns[1]), observations=seen)]
        return leader.exchange(8, replies, 5, epoch=3).shares

    assert split(None, None) is None
    assert split(HERE, None) is None, "the other one comes"
    assert split(RESTORED, RESTORED) is None, "a restored epoch goes on"
    assert split(HERE, HERE) == (12, 4)


def test_a_batch_that_is_not_left_open_stays_through_a_turn() -> None:
    leader = _leader()
    leader.bounds = None

    verdict = leader.exchange(8, [_reply(0, HERE), _reply(1, HERE)], 5)

    assert verdict.batch == 16 and leader.control.fleet is not None
    assert leader.control.fleet.global_batch == 16
