"""What an online search decides, from probes of machines that are known."""

from __future__ import annotations

from dataclasses import replace
from math import exp, hypot

import pytest

from evenstride.core.convergence.batch_laws import MeasuredTraining, gamma_of
from evenstride.core.gradients.noise_scale import Z95
from evenstride.planner.online_forecast import Configuration, Probe, TrainingJob, foresee
from evenstride.planner.online_policy import (
    MOST_PROBES,
    OnlineStanding,
    awaits_noise,
    choices,
    decide,
    extremes,
    must_restart,
    overhead,
    whole_epochs,
    with_gamma,
)
from evenstride.planner.search.selection import Objective
from evenstride.planner.workload.epochs_to_target import epochs_of_runs
from evenstride.planner.workload.workload_profile import Noise, surest
from tests.messages import check_message
from tests.unit.planner.searching import Truth

FOUR = Truth([1e-4, 2e-4, 4e-4, 4e-4])
NOISY = Noise(scale=1000.0, low=800.0, high=1250.0)
JOB = TrainingJob(samples=60_000, epochs=30, base=64, gradient_bytes=4e5)
WORKERS, BATCHES = (1, 2, 4), (64, 256, 1024)


def job(**changes: object) -> TrainingJob:
    return replace(JOB, **changes)  # type: ignore[arg-type]


def searched(
    truth: Truth, asked: TrainingJob, batches: tuple[int, ...], switch_s: float = 1.0
) -> list[Configuration]:
    """Return where a search goes, the last one where it stays."""
    possible = choices(WORKERS, batches)
    at, probes, way = min(possible), list[Probe](), list[Configuration]()
    for visit in range(1, 10):
        way.append(at)
        probes = [p for p in probes if p.choice != at] + [truth.probe(at)]
        noise = [p.noise for p in probes if p.noise is not None]
        found = noise[-1] if noise else None
        reported = replace(asked, noise=found, batches=len(batches), base=min(batches))
        decision = decide(
            reported, possible, probes, OnlineStanding(at, {at.batch: 2560.0}, switch_s, visit)
        )
        if decision.to is None:
            return way
        at = decision.to
    raise AssertionError("it never stays")


def test_the_extremes_come_first_and_one_tells_of_all_between() -> None:
    assert extremes(WORKERS, BATCHES) == (Configuration(1, 64), Configuration(4, 1024))
    assert choices((1, 4), (2, 8)) == (
        Configuration(1, 2),
        Configuration(1, 8),
        Configuration(4, 8),
    )

    way = searched(Truth([1e-4] * 4), job(epochs=30.0), (256,))

    assert way == [Configuration(1, 256), Configuration(4, 256)]


def test_steps_that_were_not_measured_are_foreseen_from_two_that_were() -> None:
    truth = replace(FOUR, noise=NOISY, beside=1.1)
    probes = [truth.probe(Configuration(1, 64)), truth.probe(Configuration(4, 1024))]
    reported = job(noise=NOISY, batches=3)

    found = {one.choice: one for one in foresee(reported, choices(WORKERS, BATCHES), probes, {})}

    assert len(found) == 9
    for choice, one in found.items():
        assert one.step_s.value == pytest.approx(truth.step_s(choice), rel=0.02)
        assert one.step_s.low < truth.step_s(choice) < one.step_s.high
        epochs = 30 * (1000 + choice.batch) / (1000 + 64)
        assert one.epochs == pytest.approx(epochs)
        steps = epochs * 60_000 / choice.batch
        assert one.time_s.value == pytest.approx(steps * one.step_s.value)
        assert one.cost_usd.value == pytest.approx(choice.workers * one.time_s.value / 3600)
        assert one.measured == (choice in {p.choice for p in probes})


def test_trained_samples_count_by_their_value() -> None:
    reported = job(noise=NOISY, batches=3)

    assert reported.left({}) == 1.0
    assert reported.left({64: 0.5 * 30 * 60_000}) == pytest.approx(0.5)
    # At 1024 the same samples are worth about half as much.
    assert reported.left({1024: 0.5 * 30 * 60_000}) == pytest.approx(1 - 0.5 * 1064 / 2024)
    assert reported.left({64: 1e9}) == 0.0


@pytest.mark.parametrize(
    ("objective", "chosen"),
    [(Objective.TIME, 4), (Objective.COST, 1)],
)
def test_the_quickest_has_many_workers_and_the_cheapest_few(
    objective: Objective, chosen: int
) -> None:
    way = searched(FOUR, job(epochs=300.0, objective=objective), (256,))

    assert way[-1].workers == chosen
    assert Configuration(4, 256) in way


def test_the_knee_is_chosen_where_switches_are_short() -> None:
    way = searched(FOUR, job(epochs=300.0, objective=Objective.KNEE), (256,))

    assert way[-1] in choices(WORKERS, (256,))
    assert way[:2] == [Configuration(1, 256), Configuration(4, 256)]


def test_a_training_that_is_nearly_over_is_left_alone() -> None:
    possible = choices(WORKERS, (64,))
    probe = FOUR.probe(Configuration(1, 64))
    whole = JOB.samples * JOB.epochs
    for left_s, looks in ((3.0, False), (1000.0, True)):
        done = whole - left_s * 64 / probe.step_s
        decision = decide(
            JOB, possible, [probe], OnlineStanding(Configuration(1, 64), {64: done}, 1.0)
        )
        assert (decision.to is not None) == looks
        assert decision.probe == looks
        assert ("too little" in decision.reason) != looks


def test_without_gradient_noise_batches_are_not_compared() -> None:
    alone = choices((1,), BATCHES)
    reported = job(batches=3)

    decision = decide(
        reported,
        alone,
        [FOUR.probe(Configuration(1, 64))],
        OnlineStanding(Configuration(1, 64), {}),
    )

    assert decision.to is None
    assert "noise" in decision.reason
    # With several workers it is looked for, and where it is not found the base batch stays.
    assert searched(FOUR, reported, BATCHES) == [
        Configuration(1, 64),
        Configuration(4, 1024),
        Configuration(1, 64),
    ]


def test_with_gradient_noise_the_batch_is_chosen_too() -> None:
    noisier = replace(FOUR, noise=Noise(scale=1e5, low=9e4, high=1.2e5))
    calmer = replace(FOUR, noise=Noise(scale=20.0, low=18.0, high=22.0))
    reported = job(epochs=100.0)

    assert searched(noisier, reported, BATCHES)[-1] == Configuration(4, 1024)
    assert searched(calmer, reported, BATCHES)[-1].batch == 64


FALLING = (MeasuredTraining(64, 30.0), MeasuredTraining(1024, 12.0))  # as in Scavenger's data


def test_earlier_trainings_decide_by_scavengers_law_whatever_the_noise() -> None:
    """The law of large batches has epochs rise, so it stays at the smallest batch here."""
    calmer = replace(FOUR, noise=Noise(scale=20.0, low=18.0, high=22.0))
    fitted = epochs_of_runs(FALLING)
    reported = job(epochs=100.0, fitted=fitted)

    assert "Scavenger's law" in fitted.why
    assert searched(calmer, job(epochs=100.0), BATCHES)[-1].batch == 64
    assert searched(calmer, reported, BATCHES)[-1] == Configuration(4, 1024)
    # Nor is any noise needed, which a single worker could not measure.
    assert searched(FOUR, reported, BATCHES)[-1] == Configuration(4, 1024)
    assert job(batches=3, fitted=fitted).compares
    assert not job(batches=3).compares


def test_epochs_of_earlier_trainings_follow_their_law_and_no_trial_makes_them_surer() -> None:
    probes = [FOUR.probe(Configuration(1, 64)), FOUR.probe(Configuration(4, 1024))]
    reported = job(batches=3, fitted=epochs_of_runs(FALLING))

    (one,) = foresee(reported, [Configuration(4, 256)], probes, {})

    # A line in 1 / sqrt(B): 1/8, 1/16 and 1/32.
    assert one.epochs == pytest.approx(12 + (30 - 12) * (2 - 1) / (4 - 1))
    assert one.time_s.high > 1.24 * one.time_s.value  # so few trainings may vary by 25 %
    assert one.own_s.high < 1.1 * one.own_s.value
    assert reported.left({1024: 0.5 * 12 * 60_000}) == pytest.approx(0.5)


def test_a_switch_that_gains_less_than_it_costs_is_not_made() -> None:
    possible = choices((1, 2), (64,))
    probes = [FOUR.probe(Configuration(1, 64)), FOUR.probe(Configuration(2, 64))]
    found = {one.choice: one.time_s.value for one in foresee(JOB, possible, probes, {})}
    worse, better = sorted(found, key=lambda choice: -found[choice])
    gain_s = found[worse] - found[better]
    order = sorted(probes, key=lambda probe: probe.choice == worse)

    goes = decide(JOB, possible, order, OnlineStanding(worse, {}, 0.99 * gain_s, 2))
    stays = decide(JOB, possible, order, OnlineStanding(worse, {}, 1.01 * gain_s, 2))

    assert goes.to == better
    assert stays.to is None
    assert "less than a switch" in stays.reason


def test_a_third_is_tried_if_it_may_be_better_and_enough_is_left() -> None:
    # 3 workers are nearly as good as 4.
    truth = Truth([1e-4, 1e-4, 1e-4, 3e-4], latency_s=0.0001, gradient_bytes=1e5)
    reported = job(base=256, gradient_bytes=1e5)
    possible = choices((1, 3, 4), (256,))
    probes = [truth.probe(Configuration(1, 256)), truth.probe(Configuration(4, 256))]
    here = OnlineStanding(Configuration(4, 256), {}, 2.0, 2)

    ahead = decide(replace(reported, epochs=2000.0), possible, probes, here)
    short = decide(replace(reported, epochs=2.0), possible, probes, here)

    assert (ahead.to, ahead.probe) == (Configuration(3, 256), True)
    assert short.to is None
    # It was no better, so training comes back, and it is not tried twice.
    probes += [truth.probe(Configuration(3, 256))]
    there = replace(here, present=Configuration(3, 256), visits=3)
    again = decide(replace(reported, epochs=2000.0), possible, probes, there)
    assert (again.to, again.probe) == (Configuration(4, 256), False)
    probes = [probes[0], probes[2], probes[1]]
    back = decide(replace(reported, epochs=2000.0), possible, probes, replace(here, visits=4))
    assert back.to is None


def test_a_search_ends_after_so_many_configurations() -> None:
    possible, reported = choices((1, 2), (64,)), job(epochs=1e4)
    alone = [FOUR.probe(Configuration(1, 64))]
    both = [*alone, FOUR.probe(Configuration(2, 64))]

    def decided(probes: list[Probe], visits: int) -> Configuration | None:
        return decide(
            reported, possible, probes, OnlineStanding(probes[-1].choice, {}, 0.1, visits)
        ).to

    assert decided(alone, 1) == Configuration(2, 64)
    assert decided(alone, MOST_PROBES) is None
    # One worker is quicker here: back to it, once.
    assert decided(both, MOST_PROBES) == Configuration(1, 64)
    assert decided(both, MOST_PROBES + 1) is None


def test_new_processes_get_the_epochs_that_their_batch_needs() -> None:
    probe = FOUR.probe(Configuration(4, 1024))
    reported = job(noise=NOISY, batches=3)
    (here,) = foresee(reported, [Configuration(4, 1024)], [probe], {64: 6000.0})
    epoch_s = 60_000 / 1024 * here.step_s.value

    assert here.epochs == pytest.approx(30 * 2024 / 1064, rel=0.01)
    assert whole_epochs(here) == 57
    assert whole_epochs(replace(here, epochs=30.0000001)) == 30
    assert must_restart(here, 30, 60_000, 1e9)  # it would end too early, whatever a switch costs
    assert must_restart(here, 56, 60_000, 1e9)
    assert not must_restart(here, 57, 60_000, 1e-9)
    assert must_restart(here, 59, 60_000, 1.9 * epoch_s)
    assert not must_restart(here, 59, 60_000, 2.1 * epoch_s)


def test_the_overhead_is_what_the_chosen_configuration_would_have_saved() -> None:
    found = overhead(search_s=10.0, samples=8000.0, per_s=1000.0, left_s=90.0)

    assert (found.useful_s, found.lost_s, found.total_s) == (8.0, 2.0, 100.0)
    assert found.part == pytest.approx(0.02)
    assert overhead(0.0, 0.0, 1000.0, 0.0).part == 0.0


def test_the_noise_that_is_known_best_counts() -> None:
    open_end = Noise(scale=900.0, low=100.0)

    assert surest([None, open_end, NOISY, None, Noise(scale=50.0, low=10.0, high=90.0)]) == NOISY
    assert surest([None, open_end]) == open_end
    assert surest([None]) is None


def test_settled_noise_counts_before_noise_that_is_known_better() -> None:
    rising = Noise(scale=100.0, low=99.0, high=101.0, settled=False)
    settled = Noise(scale=900.0, low=100.0, settled=True)

    assert surest([rising, settled]) == settled
    assert surest([rising, None]) == rising


def test_a_phase_goes_on_until_its_noise_has_settled_but_not_for_ever() -> None:
    rising, settled = (Noise(scale=100.0, settled=one) for one in (False, True))

    assert awaits_noise(rising, 0.01)
    assert not awaits_noise(rising, 0.06)
    assert not awaits_noise(settled, 0.01)
    assert not awaits_noise(None, 0.01), "one worker measures none"


def test_settled_noise_of_the_extremes_gives_scavengers_constants() -> None:
    trained = [MeasuredTraining(64, 30.0), MeasuredTraining(1024, 12.0)]
    noises = [Noise(scale=n, settled=True) for n in (400.0, 900.0)]
    small, large = (
        replace(FOUR.probe(Configuration(4, run.batch)), noise=noise)
        for run, noise in zip(trained, noises, strict=True)
    )

    both = with_gamma(trained, [small, large])
    law = epochs_of_runs(both)

    gammas = [gamma_of(400.0, 64, 8), gamma_of(900.0, 1024, 8)]
    assert [run.gamma for run in both] == gammas
    theta = 18.0 / (gammas[0] - gammas[1])
    assert f"e = {30.0 - theta * gammas[0]:.3g} {theta:+.3g} gamma" in law.why
    between = law.at(256)
    assert between is not None
    assert between.value == pytest.approx(30.0 - 18.0 * (1 / 8 - 1 / 16) / (1 / 8 - 1 / 32))
    unsettled = replace(large, noise=Noise(scale=900.0, settled=False))
    assert with_gamma(trained, [small, unsettled])[1].gamma is None


def test_a_probe_survives_json() -> None:
    probe = replace(FOUR, noise=NOISY).probe(Configuration(4, 256))
    probe = replace(probe, drift=0.3, beside_s=2.5)

    assert Probe.from_plain(probe.to_plain()) == probe
    assert Probe.from_plain(FOUR.probe(Configuration(1, 64)).to_plain()).noise is None


def test_all_visits_of_a_configuration_count_and_doubt_each_other() -> None:
    """As one worker at a batch was measured at 6.9 ms once, and at 15.4 ms later."""
    first, later = (
        replace(FOUR.probe(Configuration(1, 64), 60), step_s=s) for s in (0.0069, 0.0154)
    )
    later = replace(later, steps=20, drift=0.05)

    (found,) = foresee(JOB, [Configuration(1, 64)], [first, later], {})

    assert found.step_s.value == pytest.approx((60 * 0.0069 + 20 * 0.0154) / 80)
    assert found.step_s.low < 0.0069
    assert found.step_s.high > 0.0154
    (alone,) = foresee(JOB, [Configuration(1, 64)], [later], {})
    assert alone.step_s.high / alone.step_s.value == pytest.approx(exp(Z95 * hypot(0.05, 0.01)))


def test_what_wandered_is_doubted_where_it_was_not_measured_too() -> None:
    truth = [FOUR.probe(Configuration(1, 64)), FOUR.probe(Configuration(4, 1024))]
    unsure = [replace(probe, drift=0.2) for probe in truth]

    for choice in choices(WORKERS, (64, 1024)):
        (sure,) = foresee(job(noise=NOISY, batches=2), [choice], truth, {})
        (wide,) = foresee(job(noise=NOISY, batches=2), [choice], unsure, {})
        assert wide.step_s.value == sure.step_s.value
        assert wide.step_s.high / wide.step_s.value > exp(1.9 * 0.2)
        # It is common to all, so a look at another one would not tell.
        assert wide.own_s == sure.own_s
        assert sure.own_s.high <= wide.time_s.high


def test_an_epoch_includes_the_measured_time_outside_of_its_steps() -> None:
    probe = FOUR.probe(Configuration(1, 64))
    (bare,) = foresee(JOB, [Configuration(1, 64)], [probe], {64: 0.5 * 30 * 60_000})

    measured = [probe, replace(probe, beside_s=4.0)]
    (whole,) = foresee(JOB, [Configuration(1, 64)], measured, {64: 0.5 * 30 * 60_000})

    assert whole.time_s.value == pytest.approx(bare.time_s.value + 15 * 4.0)


def test_the_reason_says_why_the_last_one_won() -> None:
    possible, reported = choices((1, 2), (64,)), job(epochs=1e4)
    probes = [FOUR.probe(Configuration(2, 64)), FOUR.probe(Configuration(1, 64))]

    decision = decide(
        reported, possible, probes, OnlineStanding(Configuration(1, 64), {}, 0.1, MOST_PROBES + 1)
    )

    assert decision.to is None
    check_message(decision.reason, "64 samples")
