"""Parts of measured steps, reported in any order by ranks with samples, and their sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.gradients.noise_scale import (
    GradientNorms,
    NoiseEstimate,
    NoiseOfRun,
    StepParts,
)

TOLD = (
    StepParts(7, 1, 8, 64, 8 * 5.0, 2.0),
    StepParts(7, 1, 16, 64, 16 * 4.0, 2.0),
    StepParts(7, 1, 40, 64, 40 * 3.0, 2.0),
)


def test_the_parts_of_a_step_are_what_the_norms_are_made_of() -> None:
    known, whole = NoiseOfRun().hear(TOLD)

    expected = GradientNorms.of((8, 16, 40), (5.0, 4.0, 3.0), 2.0)
    assert [parts.norms for parts in whole] == [expected]
    assert whole[0].step == 7
    assert known == NoiseOfRun(NoiseEstimate().after(expected), 1)


def test_a_step_waits_for_the_reports_of_all_ranks_with_samples() -> None:
    known, whole = NoiseOfRun().hear(TOLD[:1])
    assert not whole

    known, whole = known.hear(TOLD[1:2])
    assert not whole
    assert known.steps == 0

    known, whole = known.hear(TOLD[2:])
    assert len(whole) == 1
    assert (known.steps, known.open) == (1, ())


def test_a_process_may_tell_of_several_parts_at_once() -> None:
    _, whole = NoiseOfRun().hear([StepParts(3, 3, 64, 64, 224.0, 2.0)])

    assert whole[0].norms == GradientNorms.of((8, 16, 40), (5.0, 4.0, 3.0), 2.0)


def test_the_loss_of_a_step_is_the_mean_over_its_parts_by_their_weights() -> None:
    losses = [
        replace(parts, loss=parts.weight * loss)
        for parts, loss in zip(TOLD, (1, 2, 5), strict=True)
    ]

    _, (whole,) = NoiseOfRun().hear(losses)
    _, (partly,) = NoiseOfRun().hear([*losses[:2], TOLD[2]])

    assert whole.mean_loss == (8 * 1 + 16 * 2 + 40 * 5) / 64
    assert partly.mean_loss is None, "one rank's loss is not known"


def test_a_step_of_one_part_tells_nothing() -> None:
    known, whole = NoiseOfRun().hear([StepParts(3, 1, 64, 64, 128.0, 2.0)])

    assert (known, whole) == (NoiseOfRun(), ())


@pytest.mark.parametrize(
    "other",
    [
        replace(TOLD[0], batch=60),
        replace(TOLD[0], mean=2.1),
        replace(TOLD[0], weight=41.0),
    ],
    ids=["another batch", "another gradient", "more than the batch"],
)
def test_parts_that_are_not_of_one_step_are_not_put_together(other: StepParts) -> None:
    known, whole = NoiseOfRun().hear([TOLD[2], other])

    assert not whole
    assert known.open == (other,), "the later ones are kept"


def test_equal_gradients_on_unequal_devices_are_of_one_step() -> None:
    _, whole = NoiseOfRun().hear([*TOLD[:2], replace(TOLD[2], mean=2.0 * (1 + 1e-9))])

    assert len(whole) == 1


def test_weights_that_add_up_to_the_batch_but_for_rounding_are_whole() -> None:
    thirds = [StepParts(1, 1, 0.1, 0.3, 0.1, 0.5) for _ in range(3)]

    _, whole = NoiseOfRun().hear(thirds)

    assert len(whole) == 1


def test_what_never_becomes_whole_makes_way() -> None:
    lost = [StepParts(step, 1, 8, 64, 40.0, 2.0) for step in range(500)]

    known, whole = NoiseOfRun().hear(lost)
    assert not whole
    assert [parts.step for parts in known.open] == list(range(436, 500))

    known, whole = known.hear([replace(parts, step=600) for parts in TOLD])
    assert [parts.step for parts in whole] == [600]
    assert len(known.open) == 64


def test_a_long_exchange_is_put_together_before_anything_makes_way() -> None:
    by_rank = [[replace(parts, step=step) for step in range(512)] for parts in TOLD]

    known, whole = NoiseOfRun().hear(parts for reported in by_rank for parts in reported)

    assert [parts.step for parts in whole] == list(range(512))
    assert (known.steps, known.open) == (512, ())


steps = st.lists(
    st.tuples(
        st.lists(st.integers(0, 50), min_size=1, max_size=5),  # shares
        st.floats(0.0, 1e6),
        st.booleans(),  # whether all arrives
    ),
    min_size=1,
    max_size=8,
)


@given(steps=steps, data=st.data())
def test_in_whatever_order_parts_come_each_whole_step_counts_once(
    steps: list[tuple[list[int], float, bool]], data: st.DataObject
) -> None:
    reported, expected = [], {}
    for number, (shares, mean, arrives) in enumerate(steps):
        batch = sum(shares)
        parts = [
            StepParts(number, 1, share, batch, share * (mean + rank), mean)
            for rank, share in enumerate(shares)
            if share
        ]
        reported += parts if arrives else parts[1:]
        if arrives and len(parts) > 1:
            squared = [mean + rank for rank, _ in enumerate(shares)]
            expected[number] = GradientNorms.of(shares, squared, mean)
    reported = data.draw(st.permutations(reported))
    cut = data.draw(st.integers(0, len(reported)))

    first, some = NoiseOfRun().hear(reported[:cut])
    known, others = first.hear(reported[cut:])

    found = {parts.step: parts.norms for parts in (*some, *others)}
    assert found.keys() == expected.keys()
    assert known.steps == len(expected) == len(some) + len(others)
    for number, norms in expected.items():
        assert (found[number].parts, found[number].batch) == (norms.parts, norms.batch)
        assert found[number].local == pytest.approx(norms.local, rel=1e-12)
        assert found[number].mean == norms.mean
