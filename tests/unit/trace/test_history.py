"""The course of a training, as a trace with several lives has it."""

from __future__ import annotations

import json
from math import inf, isnan
from pathlib import Path

import pytest

from evenstride.core.convergence.batch_laws import Value
from evenstride.errors import TraceError
from evenstride.trace.run_log import read_course
from tests.messages import raises_message
from tests.unit.planner.runs import SAMPLES, life, metric, noisy, went

STEPS = SAMPLES // 512  # of an epoch


def test_steps_and_metrics_have_their_places_in_the_training(tmp_path: Path) -> None:
    life(
        tmp_path,
        [
            went(0, 0.0),
            metric(1.0, 0.8),
            went(STEPS, 1.0),
            noisy(STEPS - 1, 5.0, loss=2.0),
            noisy(STEPS + 49, 6.0, loss=1.5),
            metric(1.5, None),
            metric(1.5, 0.25, "error"),
        ],
    )

    course = read_course(tmp_path)

    assert course.metrics["loss"] == (Value(1.0, 0.8), Value(1.5, inf))
    assert course.metrics["error"] == (Value(1.5, 0.25),)
    assert course.losses == (Value(1.0, 2.0), Value(1.5, 1.5))
    assert course.batches == (512,)


def test_an_epochs_last_step_may_have_fewer_samples(tmp_path: Path) -> None:
    life(tmp_path, [went(0, 0.0), noisy(51, 5.0, 1000, loss=1.0)], batch=1000)

    assert read_course(tmp_path).losses == (Value(1.0, 1.0),)


def test_what_a_run_went_back_on_does_not_count(tmp_path: Path) -> None:
    """The first life trains 3 epochs, the second goes on from a checkpoint after 1.5."""
    first = [went(STEPS * e, float(e)) for e in range(3)]
    first += [noisy(n, 5.0, loss=9.0) for n in range(49, 300, 50)]
    first += [metric(1.0, 0.9), metric(2.0, 0.3), metric(3.0, 0.2)]
    life(tmp_path, first)
    again = [went(0, 1.5), noisy(49, 7.0, loss=4.0), metric(2.0, 0.6)]
    life(tmp_path, again)

    course = read_course(tmp_path)

    assert course.metrics["loss"] == (Value(1.0, 0.9), Value(2.0, 0.6))
    assert course.losses == (Value(0.5, 9.0), Value(1.0, 9.0), Value(1.5, 9.0), Value(2.0, 4.0))


def test_the_same_within_one_process(tmp_path: Path) -> None:
    records = [went(0, 0.0), metric(0.9, 0.5), went(90, 0.4), metric(0.5, 0.7)]
    late = [noisy(89, 5.0, loss=1.0), noisy(39, 5.0, loss=2.0), noisy(99, 5.0, loss=3.0)]
    life(tmp_path, [*records, *late])

    course = read_course(tmp_path)

    assert course.metrics["loss"] == (Value(0.5, 0.7),)
    assert course.losses == (Value(0.4, 2.0), Value(0.5, 3.0)), "reported late, and undone by then"


def test_a_look_before_the_checkpoint_is_restored_undoes_nothing(tmp_path: Path) -> None:
    life(tmp_path, [went(0, 0.0), metric(1.0, 0.6), metric(2.0, 0.4)])
    life(tmp_path, [metric(0.0, 2.0), went(0, 2.0), metric(3.0, 0.3)])

    found = read_course(tmp_path).metrics["loss"]

    assert [one.value for one in found] == [2.0, 0.6, 0.4, 0.3]


def test_a_run_that_begins_again_counts_alone(tmp_path: Path) -> None:
    life(tmp_path, [went(0, 0.0), metric(1.0, 0.1), noisy(5, 1.0)])
    life(tmp_path, [went(0, 0.0), metric(1.0, 0.5)])

    course = read_course(tmp_path)

    assert course.metrics["loss"] == (Value(1.0, 0.5),)
    assert not course.steps


@pytest.mark.parametrize(("bounds", "batches"), [(None, (256,)), ([64, 1024], (512, 256))])
def test_another_batch_is_another_training_unless_it_was_left_open(
    tmp_path: Path, bounds: list[int] | None, batches: tuple[int, ...]
) -> None:
    life(tmp_path, [went(0, 0.0), metric(1.0, 0.6)], bounds=bounds)
    life(tmp_path, [went(0, 1.0), metric(2.0, 0.4)], batch=256, bounds=bounds)

    course = read_course(tmp_path)

    assert course.batches == batches
    assert len(course.metrics["loss"]) == len(batches)


def test_a_process_that_was_refused_undoes_nothing(tmp_path: Path) -> None:
    life(tmp_path, [went(0, 0.0), metric(1.0, 0.6)])
    life(tmp_path, batch=256)

    course = read_course(tmp_path)

    assert (course.metrics["loss"], course.batches) == ((Value(1.0, 0.6),), (512,))


def test_a_trace_of_an_older_version_has_steps_without_places(tmp_path: Path) -> None:
    life(tmp_path, [noisy(5, 30.0), noisy(9, 30.0)])

    course = read_course(tmp_path)

    assert [isnan(step.epochs) for step in course.steps] == [True, True]
    assert [step.loss for step in course.steps] == [None, None]
    assert course.losses == ()


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "pass", "step": 1, "epochs": 0.5},
        {"kind": "metric", "step": 1, "name": "loss", "value": 1.0},
        {"kind": "metric", "epochs": 1.0, "value": 1.0},
        {"kind": "metric", "epochs": 1.0, "name": "a", "value": "b"},
        {"kind": "noise", "step": 3, "parts": 2},
    ],
)
def test_a_record_that_was_changed_is_refused(tmp_path: Path, record: dict[str, object]) -> None:
    life(tmp_path, [record])

    with raises_message(TraceError):
        read_course(tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        went(0, float("nan")),
        went(0, float("inf")),
        {**went(0, 0.0), "samples": 10**400},
        metric(float("nan"), 0.5),
        metric(1.0, float("nan")),
        {**noisy(3, 5.0), "local": float("inf")},
        {**noisy(3, 5.0), "batch": 0},
    ],
)
def test_invalid_numbers_are_refused(tmp_path: Path, record: dict[str, object]) -> None:
    """Traces are written without them, and Python's JSON reads them nevertheless."""
    path = life(tmp_path, [went(0, 0.0)])
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")

    with raises_message(TraceError):
        read_course(tmp_path)


def test_a_loss_that_is_no_number_is_not_known(tmp_path: Path) -> None:
    path = life(tmp_path, [went(0, 0.0)])
    with path.open("a") as file:
        file.write(json.dumps(noisy(3, 5.0, loss=float("nan"))) + "\n")

    assert read_course(tmp_path).steps[0].loss is None


def test_a_line_of_a_hundred_thousand_brackets_is_no_record(tmp_path: Path) -> None:
    path = life(tmp_path, [went(0, 0.0)])
    path.write_text(path.read_text() + "[" * 100_000 + "\n" + json.dumps(went(0, 0.0)) + "\n")

    with raises_message(TraceError):
        read_course(tmp_path)


def test_a_batch_that_changed_where_an_epoch_ended_counts_for_its_own_steps(
    tmp_path: Path,
) -> None:
    small, large = STEPS, STEPS // 2
    life(
        tmp_path,
        [
            went(0, 0.0) | {"global_batch": 512},
            noisy(small // 2 - 1, 5.0, loss=3.0),
            went(small, 1.0) | {"global_batch": 1024},
            noisy(small * 3 // 4 - 1, 5.0, loss=2.0),  # heard of after the next pass began
            noisy(small + large // 2 - 1, 6.0, 1024, loss=1.0),
        ],
        bounds=[512, 1024],
    )

    course = read_course(tmp_path)

    assert course.batches == (512, 1024)
    assert course.losses == (Value(0.5, 3.0), Value(0.75, 2.0), Value(1.5, 1.0))
    assert [step.samples for step in course.steps] == [512, 512, 1024]
