"""The figures of a demo, from the report of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.lab.comparison.comparison_result import Comparison
from evenstride.lab.demo.demo_run import audit, compare, final_loss
from evenstride.lab.demo.demo_schedule import Report
from tests.unit.lab.reports import SAMPLES, block, report, usual

EPOCH = [(0, [0, 1]), (0, [2, 3])]


def _whole(tempo: Sequence[float] = (1.0,) * 4, equal_s: float = 0.06) -> Report:
    first, second = (usual(rank, tempo=tempo, equal_s=equal_s) for rank in range(2))
    for some in (*first, *second):
        some.ids.append((0, []))
    return report(first, second)


def _compared(whole: Report) -> Comparison:
    return compare(whole, (1.0, 0.5), "numbers", "adaptive.jsonl")


def test_times_are_those_of_the_rounds_without_the_cold_blocks() -> None:
    outcome = _compared(_whole())

    uniform, adaptive = outcome.runs
    assert (uniform.policy, adaptive.policy) == ("uniform", "adaptive")
    assert uniform.step_s == pytest.approx(0.06)
    assert adaptive.step_s == pytest.approx(0.042)
    assert adaptive.samples_per_s == pytest.approx(6 / 0.042)
    assert outcome.speedup == pytest.approx(0.06 / 0.042)
    assert outcome.pairs == 4


def test_efficiency_is_relative_to_the_fastest_fixed_split() -> None:
    outcome = _compared(_whole())

    assert outcome.oracle is not None
    assert outcome.oracle.shares == (4, 2)
    assert outcome.oracle.step_s == pytest.approx(0.040)
    assert outcome.runs[0].efficiency == pytest.approx(2 / 3)
    assert outcome.runs[1].efficiency == pytest.approx(0.040 / 0.042)


def test_the_bound_is_the_equal_step_over_the_best_one_by_the_busy_times() -> None:
    # The slowest worker of every split has 2 ms left in a balanced step, and none in the others.
    outcome, slower = _compared(_whole()), _compared(_whole(equal_s=0.08))

    assert outcome.bound == pytest.approx(0.06 / 0.04)
    assert outcome.linear_bound == pytest.approx(1.5)
    assert slower.bound == pytest.approx(0.08 / 0.04), "the equal split is measured, not computed"


def test_a_communication_that_no_split_avoids_counts_in_the_bound() -> None:
    whole = _whole()
    for mine in whole.ranks:
        for some in mine.blocks:
            some.step_s = [step_s + 0.02 for step_s in some.step_s]

    assert _compared(whole).bound == pytest.approx(0.08 / 0.06)


def test_a_machine_that_drifts_leaves_the_ratios_and_their_intervals_alone() -> None:
    steady, drifting = (_compared(_whole(tempo)) for tempo in ((1.0,) * 5, (1, 1.1, 1.3, 0.8, 1.2)))

    assert drifting.drift == pytest.approx(0.2, abs=1e-4)
    assert drifting.speedup == pytest.approx(steady.speedup)
    assert drifting.speedup_interval == pytest.approx(steady.speedup_interval)
    assert drifting.runs[1].efficiency_interval == pytest.approx((0.04 / 0.042, 0.04 / 0.042))
    assert not drifting.disturbed


@pytest.mark.parametrize(("swing", "disturbed"), [(1.02, False), (2.0, True)])
def test_a_demo_is_disturbed_if_its_ratios_are_uncertain(swing: float, disturbed: bool) -> None:
    whole = _whole()
    late = [b for b in whole.ranks[0].blocks if b.policy == "adaptive"][-1]
    late.step_s = [swing * step_s for step_s in late.step_s]

    outcome = _compared(whole)

    assert outcome.disturbed is disturbed
    low, high = outcome.speedup_interval or (0.0, 0.0)
    assert low < 0.06 / 0.042 < high


def test_the_rest_is_passed_on_as_it_was_reported() -> None:
    outcome = _compared(_whole())

    uniform, adaptive = outcome.runs
    assert (outcome.workers, outcome.speeds, outcome.limits) == (2, (1.0, 0.5), "numbers")
    assert (outcome.global_batch, outcome.trace) == (6, "adaptive.jsonl")
    assert outcome.achieved_speeds == pytest.approx((1.0, 0.5))
    assert (uniform.changes, adaptive.changes) == (0, 2)
    assert (uniform.test_accuracy, adaptive.test_accuracy) == (0.9, 0.91)
    assert (uniform.shares, adaptive.shares) == ((3, 3), (4, 2))


def test_a_split_that_was_fast_once_is_not_the_fastest() -> None:
    whole = _whole()
    lucky = next(b for b in whole.ranks[0].blocks if b.policy == "static:5,1")
    lucky.step_s = [0.03] * 3

    outcome = _compared(whole)

    assert outcome.oracle is not None
    assert outcome.oracle.shares == (4, 2)


def test_the_final_loss_is_the_mean_per_sample_over_steps_that_both_have_trained() -> None:
    # The adaptive arm trains a third block; its loss must not count, or unequal work is compared.
    early = [block("uniform", [0.1], (1, 2), loss=3.0), block("adaptive", [0.1], (2, 1), loss=5.0)]
    late = [block("adaptive", [0.1], (2, 1), loss=0.0)]
    other = [block("uniform", [0.1], (1, 2), loss=1.0), block("adaptive", [0.1], (2, 1), loss=1.0)]
    other[0].counts = [3] * 40  # a sum over three samples each

    whole = report([*early, *late], [*other, *late])

    assert final_loss(whole, "uniform") == pytest.approx((3.0 + 1.0) / (1 + 3))
    assert final_loss(whole, "adaptive") == pytest.approx((5.0 + 1.0) / 2)


def test_only_the_last_steps_count_in_the_final_loss() -> None:
    falling = block("uniform", [0.1], (1, 2))
    falling.losses = [100.0] * 20 + [2.0] * 20

    whole = report([falling, block("adaptive", [0.1], (2, 1))], [])

    assert final_loss(whole, "uniform") == pytest.approx(2.0)


def _ids(*ids: tuple[int, list[int]], other: tuple[tuple[int, list[int]], ...] = ()) -> Report:
    mine = block("uniform", [0.1], (1, 2), ids=ids)
    return report([mine], [block("uniform", [0.1], (1, 2), ids=other)])


def test_each_sample_once_in_a_finished_epoch_is_a_clean_audit() -> None:
    whole = _ids((0, [0, 2]), (1, [3]), other=((0, [1, 3]), (1, [0])))

    assert audit(whole, "uniform") == (0, 0)


def test_a_sample_that_a_finished_epoch_lacks_is_lost() -> None:
    assert audit(_ids((0, [0, 2]), (1, [3]), other=((0, [1]),)), "uniform") == (1, 0)


def test_a_sample_that_two_ranks_got_is_repeated() -> None:
    assert audit(_ids((0, [0, 2, 3]), (1, [3]), other=((0, [1, 3]),)), "uniform") == (0, 1)


def test_the_last_epoch_may_be_unfinished_but_repeats_nothing() -> None:
    assert audit(_ids((0, [0, 1]), other=((0, [1]),)), "uniform") == (0, 1)


def test_an_epoch_that_no_rank_delivered_is_lost_whole() -> None:
    assert audit(_ids((0, [0, 1, 2, 3]), (2, [3])), "uniform") == (SAMPLES, 0)


@given(
    st.lists(st.permutations(range(SAMPLES)), min_size=2, max_size=4),
    st.integers(0, SAMPLES),
    st.data(),
)
def test_the_audit_counts_removed_and_added_samples_exactly(
    epochs: list[list[int]], cut: int, data: st.DataObject
) -> None:
    lost = data.draw(st.sets(st.integers(0, SAMPLES - 1), max_size=SAMPLES - 1))
    again = data.draw(st.lists(st.integers(0, SAMPLES - 1), max_size=3))
    first, *later = epochs
    kept = [sample for sample in first if sample not in lost]
    doubled = [sample for sample in again if sample in kept]
    mine = [(0, kept[:cut]), *((n + 1, ids) for n, ids in enumerate(later))]

    whole = _ids(*mine, other=((0, kept[cut:] + doubled),))

    assert audit(whole, "uniform") == (len(lost), len(doubled))


def test_the_other_arms_samples_are_not_mixed_in() -> None:
    mine = [block("uniform", [0.1], (1, 2), EPOCH), block("adaptive", [0.1], (2, 1), EPOCH)]

    whole = report(mine, [])

    assert audit(whole, "uniform") == audit(whole, "adaptive") == (0, 0)
