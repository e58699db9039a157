"""What a job takes from stored ones: step times and epochs, scaled to its own figures."""

from __future__ import annotations

from datetime import date
from statistics import mean

import pytest

from evenstride.core.convergence.batch_laws import MeasuredTraining, fit_best
from evenstride.planner.workload.epochs_to_target import epochs_of
from evenstride.planner.workload.model_reuse import completed, epoch_errors, step_errors
from evenstride.planner.workload.step_time import fitted
from evenstride.planner.workload.workload_profile import Noise, WorkloadProfile
from tests.messages import check_message
from tests.unit.planner.workload.jobs import by_noise, device, job, stored

TODAY = date(2026, 11, 27)


def epochs_at(profile: WorkloadProfile, batch: int) -> float:
    found = epochs_of(profile, None).at(batch)
    assert found is not None
    return found.value


def test_a_similar_jobs_law_is_scaled_to_the_epochs_of_this_one() -> None:
    models = stored(
        job(1200, trainings=by_noise(10.0, 512.0)), job(90_000, trainings=by_noise(1, 9))
    )

    found = completed(job(), 30.0, models)

    assert found.epochs is None
    assert epochs_at(found.profile, 256) == pytest.approx(30.0)
    assert epochs_at(found.profile, 1024) == pytest.approx(30.0 * (1 + 2.0) / (1 + 0.5))
    (part,) = found.parts
    assert (part.what, part.kind, part.models) == ("epochs by batch", "similar", (models[0],))
    check_message(part.sentence(TODAY), "7 days ago", "0.json", "similarity 94%")


def test_the_same_jobs_trainings_count_as_they_are_without_any_epochs() -> None:
    models = stored(job(trainings=by_noise(10.0, 512.0), target="loss 0.3"))

    found = completed(job(), None, models)

    assert (found.profile.trainings, found.profile.target) == (
        models[0].profile.trainings,
        "loss 0.3",
    )
    assert found.parts[0].kind == "same"


def test_epochs_of_another_job_are_not_those_of_this_one() -> None:
    models = stored(job(1200, trainings=by_noise(10.0, 512.0)), job(9, trainings=by_noise(1, 9)))

    assert completed(job(), None, models).parts == ()


def test_the_universal_model_is_the_average_where_no_job_is_similar() -> None:
    models = stored(
        job(90_000, trainings=by_noise(10.0, 512.0)), job(9, trainings=by_noise(3.0, 128.0))
    )

    found = completed(job(), 30.0, models)

    (part,) = found.parts
    assert part.kind == "universal"
    own = [30.0 * (1 + 1024 / noise) / (1 + 256 / noise) for noise in (512.0, 128.0)]
    assert min(own) < epochs_at(found.profile, 1024) < max(own)
    check_message(part.sentence(TODAY), "2 stored jobs")


def test_one_other_job_is_no_average() -> None:
    assert completed(job(), 30.0, stored(job(90_000, trainings=by_noise(1, 9)))).parts == ()


def test_what_the_job_measured_is_not_replaced() -> None:
    models = stored(job(1200, trainings=by_noise(10.0, 512.0), devices=(device("a", 1, 1),)))
    own = job(noise=Noise(scale=900.0), devices=(device("a", 0.1, 0.01),))

    found = completed(own, 30.0, models)

    assert (found.profile, found.epochs, found.parts) == (own, 30.0, ())


def test_a_batch_outside_the_stored_trainings_is_not_extrapolated() -> None:
    models = stored(job(1200, trainings=by_noise(10.0, 512.0)))

    assert completed(job(global_batch=2048), 30.0, models).parts == ()


def test_noise_of_a_similar_job_counts_where_no_job_has_several_trainings() -> None:
    models = stored(job(1200, noise=Noise(scale=900.0)))

    found = completed(job(), 30.0, models)

    assert found.profile.noise == models[0].profile.noise
    assert (found.epochs, found.parts[0].what) == (30.0, "the gradient noise")


def test_steps_of_another_type_are_scaled_by_the_type_that_both_measured() -> None:
    models = stored(job(1200, devices=(device("a", 0.1, 0.01), device("b", 0.2, 0.002))))
    own = job(devices=(device("a", 0.3, 0.03),))

    found = completed(own, None, models)

    _, other = found.profile.devices
    assert fitted(other.points).at(300) == pytest.approx(3 * (0.2 + 0.002 * 300))
    assert [point.drift for point in other.points] == [0.2] * 3, "assumed, as none was left out"
    assert found.parts[0].what == "step times on b"


def test_steps_of_the_same_job_need_no_common_type_and_no_doubt() -> None:
    models = stored(job(devices=(device("b", 0.2, 0.002),)))

    found = completed(job(devices=(device("a", 0.3, 0.03),)), None, models)

    assert found.profile.devices[1] == models[0].profile.devices[0]


def test_steps_of_a_similar_job_without_a_common_type_are_not_used() -> None:
    models = stored(job(1200, devices=(device("b", 0.2, 0.002),)))

    assert completed(job(devices=(device("a", 0.3, 0.03),)), None, models).parts == ()


def test_one_measured_size_takes_the_shape_of_the_line_from_the_store() -> None:
    models = stored(job(1200, devices=(device("a", 0.1, 0.01),)))
    own = job(devices=(device("a", 0.2, 0.02, sizes=(512,)),))

    found = completed(own, None, models)

    assert fitted(found.profile.devices[0].points).at(32) == pytest.approx(0.2 + 0.02 * 32)
    assert fitted(own.devices[0].points).at(32) > 4, "half of a single size is assumed to be fixed"


def test_devices_that_the_plan_does_not_accept_are_left_out() -> None:
    models = stored(job(devices=(device("b", 0.2, 0.002),)))

    assert completed(job(), None, models, lambda one: one.type != "b").parts == ()


def test_left_out_jobs_show_the_errors_of_both_models() -> None:
    """Two jobs are alike except for their size; a third one has another shape."""
    models = stored(
        job(1000, trainings=by_noise(10.0, 512.0), devices=(device("a", 0.1, 0.01),)),
        job(1100, trainings=by_noise(5.0, 512.0), devices=(device("a", 0.2, 0.02),)),
        job(9, trainings=by_noise(3.0, 32.0), devices=(device("a", 2.0, 0.001),)),
    )

    for errors in (step_errors(models), epoch_errors(models)):
        assert errors is not None
        assert errors.jobs == 2, "the third has no similar job"
        assert errors.similar == pytest.approx(0.0, abs=1e-6)
        assert errors.universal > 0.05


def test_the_error_of_the_universal_model_is_that_of_the_pooled_law() -> None:
    models = stored(
        job(1000, trainings=by_noise(10.0, 512.0)),
        job(1100, trainings=by_noise(5.0, 256.0)),
        job(9, trainings=by_noise(3.0, 32.0)),
    )
    noises = (512.0, 256.0, 32.0)

    def relative(batch: int, noise: float) -> float:
        return (1 + batch / noise) / (1 + 256 / noise)

    def missed(own: float, *copies: float) -> float:
        """Return the error for one job of the law that is fitted to the others."""
        others = [noise for noise in (*noises, *copies) if noise != own]
        law = fit_best(
            [MeasuredTraining(b, relative(b, n)) for n in others for b in (64, 256, 1024)]
        )
        return mean(abs(law.epochs(b).value / relative(b, own) - 1) for b in (64, 1024))

    errors = epoch_errors(models)

    assert errors is not None
    assert errors.jobs == 2, "the third has no similar job"
    assert errors.universal == pytest.approx(mean((missed(512.0), missed(256.0))))
    # With another target, the first job has a second file, which must not reveal its epochs.
    copy = stored(*(one.profile for one in models), job(1000, trainings=by_noise(10.0, 512.0)))
    again = epoch_errors(copy)
    assert again is not None
    each = (missed(512.0), missed(512.0), missed(256.0, 512.0))
    assert again.universal == pytest.approx(mean(each))


def test_the_errors_of_left_out_jobs_are_the_doubt_about_scaled_times() -> None:
    models = stored(
        job(1100, devices=(device("a", 0.1, 0.01), device("b", 0.1, 0.01))),
        job(1200, devices=(device("a", 0.1, 0.01), device("b", 0.2, 0.01))),
        job(9, devices=(device("a", 0.1, 0.01), device("b", 0.9, 0.01))),
    )
    errors = step_errors(models)
    assert errors is not None
    assert 0 < errors.similar < errors.universal

    near = completed(job(devices=(device("a", 0.1, 0.01),)), None, models)
    far = completed(job(90_000, devices=(device("a", 0.1, 0.01),)), None, models)

    drifts = [one.profile.devices[1].points[0].drift for one in (near, far)]
    assert drifts == pytest.approx([errors.similar, errors.universal])


def test_a_stored_copy_of_the_job_does_not_reveal_what_is_left_out() -> None:
    """With another target, the same job has a second file."""
    same = job(trainings=by_noise(10.0, 512.0))
    models = stored(same, same.model_copy(update={"target": "loss 0.1"}))

    assert epoch_errors(models) is None
