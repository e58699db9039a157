"""Runs that came to a target, and those that did not."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstride.core.convergence.batch_laws import gamma_of
from evenstride.errors import ConfigError
from evenstride.planner.workload.from_trace import profile_of_run
from evenstride.planner.workload.target_runs import Aim, reached, require_target, towards
from evenstride.planner.workload.workload_profile import WorkloadProfile
from tests.messages import check_message, raises_message
from tests.unit.planner.runs import Record, life, metric, noisy, went


def towards_it(trace: Path, aim: Aim) -> tuple[WorkloadProfile, str]:
    return towards(profile_of_run(trace, ()), trace, aim)


def evaluated(epochs: int, falls: float = 0.1) -> list[Record]:
    """Return a training whose loss is 1 at first, and falls in each epoch."""
    return [went(0, 0.0), *(metric(float(e), 1.0 - falls * e) for e in range(epochs + 1))]


def test_a_metric_says_when_it_came_there(tmp_path: Path) -> None:
    found = reached(life(tmp_path, evaluated(9)), 0.35)

    assert found.of == "loss"
    assert found.reaching.epochs == pytest.approx(6.5)


def test_a_run_that_was_continued_counts_the_epochs_of_the_training(tmp_path: Path) -> None:
    """Trained to 6 epochs, lost, gone on from 4: it came there after 6.5, not after 8.5."""
    life(tmp_path, evaluated(6))
    again = [went(0, 4.0), *(metric(float(e), 1.0 - 0.1 * e) for e in range(4, 9))]

    assert reached(life(tmp_path, again), 0.35).reaching.epochs == pytest.approx(6.5)


def test_without_a_metric_the_training_loss_stands_in(tmp_path: Path) -> None:
    passes = [went(100 * e, float(e)) for e in range(10)]
    steps = [noisy(n, 100.0, loss=1.0 - 0.001 * (n + 1)) for n in range(9, 1000, 10)]

    found = reached(life(tmp_path, [*passes, *steps]), 0.35)

    assert found.of == "training loss"
    assert found.reaching.epochs == pytest.approx(6.5), "in epochs of 100 steps"


def test_a_run_that_tells_of_neither_is_refused(tmp_path: Path) -> None:
    trace = life(tmp_path, [went(0, 0.0), metric(1.0, 0.5, "error"), noisy(3, 5.0)])

    with raises_message(ConfigError):
        reached(trace, 0.35)
    with raises_message(ConfigError):
        reached(trace, 0.35, "accuracy")


def test_a_run_that_reached_its_target_is_a_training_with_its_noise_until_then(
    tmp_path: Path,
) -> None:
    early = [noisy(n, 200.0) for n in range(100)]
    middle = [went(100, 1.0), *(noisy(n, 400.0) for n in range(100, 200))]
    later = [went(200, 2.0), *(noisy(n, 10_000.0) for n in range(200, 300))]
    falls = [metric(0.0, 1.0), metric(2.0, 0.3), metric(3.0, 0.2)]
    trace = life(tmp_path, [went(0, 0.0), *early, *middle, *later, *falls])

    found, note = towards_it(trace, Aim(0.3))

    assert (found.target, note) == ("loss 0.3", "")
    (one,) = found.trainings
    assert (one.batch, one.epochs) == (512, 2.0)
    assert found.noise is not None
    assert found.noise.scale == pytest.approx(300.0), "the mean of all until then"
    assert found.noise.low < 300.0 < (found.noise.high or 0.0)
    assert one.gamma == pytest.approx(gamma_of(300.0, 512, 8))


def test_a_run_that_did_not_come_there_says_how_near(tmp_path: Path) -> None:
    trace = life(tmp_path, [*evaluated(4), *(noisy(n, 300.0) for n in range(9))])

    found, note = towards_it(trace, Aim(0.35))

    assert found.trainings == ()
    assert found.noise is not None
    check_message(note, "512", "0.35", "0.6")
    with raises_message(ConfigError, "0.35", "0.6"):
        require_target([found], Aim(0.35), [note])


def test_a_run_that_was_there_from_the_start_is_no_training(tmp_path: Path) -> None:
    found, note = towards_it(life(tmp_path, evaluated(4)), Aim(1.0))

    assert found.trainings == ()
    check_message(note)


def test_a_run_that_was_there_when_first_looked_at_is_no_training(tmp_path: Path) -> None:
    """As with an accuracy, which rises: its first value is below any target."""
    rising = [went(0, 0.0), *(metric(at, 0.1 * at) for at in (1.0, 2.0, 3.0))]
    found, note = towards_it(life(tmp_path, rising), Aim(0.35))

    assert found.trainings == ()
    check_message(note)


def test_a_run_of_several_batches_is_no_training_at_one(tmp_path: Path) -> None:
    life(tmp_path, evaluated(3), bounds=[64, 1024])
    trace = life(tmp_path, [went(0, 3.0), metric(5.0, 0.3)], batch=256, bounds=[64, 1024])

    found, note = towards_it(trace, Aim(0.35))

    assert found.trainings == ()
    check_message(note, "0.35", "512", "256")


def test_another_target_is_another_thing(tmp_path: Path) -> None:
    found, _ = towards_it(life(tmp_path, evaluated(9)), Aim(0.35))

    require_target([found], Aim(0.35), [])
    with raises_message(ConfigError, "0.35", "0.4"):
        require_target([found], Aim(0.4), [])
    with raises_message(ConfigError, "--target-loss"):
        Aim(float("nan"))
