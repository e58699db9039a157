"""From what the demo's ranks measured to its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.lab.demo.demo_run import audit, compare, fastest_fixed, final_loss
from evenstride.lab.demo.demo_schedule import Report
from tests.unit.lab.reports import SAMPLES, SLOW, block, report, usual

EPOCH = [(0, [0, 1]), (0, [2, 3])]


def _whole() -> Report:
    first, second = usual(), usual()
    for mine in (first, second):
        for some in mine:
            some.ids.append((0, []))
    return report(first, second)


def test_speeds_are_medians_of_blocks_without_the_cold_one() -> None:
    outcome = compare(_whole(), (1.0, 0.5), "numbers", "adaptive.jsonl")

    uniform, adaptive = outcome.runs
    assert (uniform.policy, adaptive.policy) == ("uniform", "adaptive")
    assert uniform.step_s == pytest.approx(0.04)
    assert adaptive.step_s == pytest.approx(0.023)
    assert adaptive.samples_per_s == pytest.approx(3 / 0.023)
    assert outcome.speedup == pytest.approx(0.04 / 0.023)


def test_efficiency_is_against_the_fastest_fixed_split_that_was_run() -> None:
    outcome = compare(_whole(), (1.0, 0.5), "numbers", "adaptive.jsonl")

    assert outcome.oracle is not None
    assert outcome.oracle.shares == (2, 1)
    assert outcome.oracle.step_s == pytest.approx(0.020)
    assert outcome.runs[0].efficiency == pytest.approx(0.5)
    assert outcome.runs[1].efficiency == pytest.approx(0.020 / 0.023)


def test_the_bound_counts_the_communication() -> None:
    outcome = compare(_whole(), (1.0, 0.5), "numbers", "adaptive.jsonl")
    slower = compare(replace(_whole(), communication_s=0.02), (1.0, 0.5), "numbers", "t")

    # Equal is (2, 1) here, for the odd sample goes to the first worker: 20 ms, the best there is.
    assert outcome.bound == pytest.approx(1.0)
    assert outcome.linear_bound == slower.linear_bound == pytest.approx(1.5)
    four = compare(replace(_whole(), global_batch=6), (1.0, 0.5), "numbers", "t")
    with_communication = replace(_whole(), global_batch=6, communication_s=0.02)
    assert four.bound == pytest.approx(60 / 40)
    assert compare(with_communication, (1.0, 0.5), "numbers", "t").bound == pytest.approx(80 / 60)


def test_the_rest_is_passed_on_as_it_was_reported() -> None:
    outcome = compare(_whole(), (1.0, 0.5), "numbers", "adaptive.jsonl")

    uniform, adaptive = outcome.runs
    assert (outcome.workers, outcome.speeds, outcome.limits) == (2, (1.0, 0.5), "numbers")
    assert (outcome.global_batch, outcome.trace) == (3, "adaptive.jsonl")
    assert outcome.achieved_speeds == pytest.approx((1.0, 0.5))
    assert (uniform.changes, adaptive.changes) == (0, 2)
    assert (uniform.test_accuracy, adaptive.test_accuracy) == (0.9, 0.91)
    assert (uniform.shares, adaptive.shares) == ((1, 2), (2, 1))


@pytest.mark.parametrize(("factor", "disturbed"), [(1.06, True), (1.04, False)])
def test_workers_that_change_between_the_calibrations_disturb(
    factor: float, disturbed: bool
) -> None:
    whole = _whole()
    slower = {size: factor * time_s for size, time_s in SLOW.items()}
    ranks = [whole.ranks[0], replace(whole.ranks[1], after=slower)]

    outcome = compare(replace(whole, ranks=ranks), (1.0, 0.5), "numbers", "t")

    assert outcome.disturbed is disturbed
    assert outcome.drift == pytest.approx(factor - 1, abs=1e-4)


def test_a_split_that_was_fast_once_does_not_win() -> None:
    lucky = [block("static:3,0", [time_s], (3, 0)) for time_s in (0.001, 0.05, 0.05)]
    steady = [block("static:2,1", [0.02], (2, 1)) for _ in range(3)]

    oracle = fastest_fixed([*lucky, *steady, block("uniform", [0.0001], (1, 2))])

    assert oracle.shares == (2, 1)


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


def test_an_epoch_that_nobody_delivered_is_lost_whole() -> None:
    assert audit(_ids((0, [0, 1, 2, 3]), (2, [3])), "uniform") == (SAMPLES, 0)


@given(
    st.lists(st.permutations(range(SAMPLES)), min_size=2, max_size=4),
    st.integers(0, SAMPLES),
    st.data(),
)
def test_the_audit_counts_exactly_what_was_taken_out_and_put_in(
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
