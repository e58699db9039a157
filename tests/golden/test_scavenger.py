"""Figures of the Scavenger paper, from its own formulas: those that were read off or quoted.

The points of its figures are read off by eye, so to some per cent. Formulas: epochs
``e = e* + theta gamma``; a step ``tau = compute / K + sync K``; cost ``T K p``.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from evenstride.core.convergence.batch_laws import (
    Law,
    MeasuredTraining,
    fit,
    fit_best,
    left_out_error,
)
from evenstride.planner.search.selection import knee

BATCHES = (384, 512, 768, 1024)
EPOCHS = (234.0, 203.0, 186.0, 167.0)  # ResNet18, 16 workers, figure 8
USD_PER_H = 0.13402  # of an E2-standard-4


def gamma(batch: int) -> float:
    """Return the normalised noise of ResNet18, as figure 9 reads."""
    return 0.55 + 4.55 / sqrt(batch)


RUNS = [MeasuredTraining(b, e, gamma(b)) for b, e in zip(BATCHES, EPOCHS, strict=True)]


def test_full_search_errs_by_1_to_5_percent_as_the_paper_says() -> None:
    law = fit(RUNS, Law.GAIN)

    errors = [abs(law.epochs(run.batch).value / run.epochs - 1) for run in RUNS]
    assert max(errors) < 0.03
    assert 0.005 < float(np.mean(errors)) < 0.035
    assert left_out_error(RUNS, Law.GAIN) == pytest.approx(0.031, abs=0.005)


def test_partial_search_from_both_ends_errs_by_at_most_4_percent() -> None:
    """The paper has a mean error of 4 % for ResNets; without the noise it would be twice as far."""
    ends = [RUNS[0], RUNS[-1]]
    between = RUNS[1:-1]

    def worst(law: Law) -> float:
        found = fit(ends, law)
        return max(abs(found.epochs(run.batch).value / run.epochs - 1) for run in between)

    assert worst(Law.GAIN) == pytest.approx(0.039, abs=0.005)
    assert worst(Law.NOISE) == pytest.approx(0.087, abs=0.005)
    assert fit_best(ends).law is Law.GAIN


def hours(workers: float) -> float:
    """Return the training time by workers: both constants from 15 h with 4, and 5 h with 16."""
    compute, sync = np.linalg.solve([[1 / 4, 4], [1 / 16, 16]], [15.0, 5.0])
    return float(compute / workers + sync * workers)


def test_the_oracles_time_and_cost_are_those_of_twelve_workers() -> None:
    """The overhead of 0.83 h is 13 %, of USD 0.89 is 9 %: an oracle of 6.4 h and USD 9.9.

    So it had 11.5 machines. Scaling from 15 h with 4 workers to 5 h with 16, which is of a job that
    is not named, gives 12 workers 5.9 h and USD 9.5: 8 and 4 % less.
    """
    oracle_h, oracle_usd = 0.83 / 0.13, 0.89 / 0.09

    assert oracle_usd / (oracle_h * USD_PER_H) == pytest.approx(11.5, abs=0.1)
    assert hours(12) == pytest.approx(oracle_h, rel=0.08)
    assert hours(12) * 12 * USD_PER_H == pytest.approx(oracle_usd, rel=0.05)


def test_the_knee_of_that_scaling_is_twelve_workers() -> None:
    """The paper's knees for ResNet18 are 16 workers at a batch of 384, and 12 at 512."""
    workers = (20, 16, 12, 8)
    times_h = [hours(k) for k in workers]
    usd = [k * hours(k) * USD_PER_H for k in workers]

    assert workers[knee(times_h, usd)] == 12


def test_the_universal_noise_errs_by_2_to_18_percent_where_the_paper_says_4_to_20() -> None:
    """The average of the other two jobs' noise, at 512 samples; the paper's error is of times."""
    at = {"resnet18": (0.55, 4.55), "resnet50": (0.79, 1.49), "transformer": (0.66, 5.97)}
    noise = {job: start + slope / sqrt(512) for job, (start, slope) in at.items()}

    errors = [
        abs((sum(noise.values()) - own) / (len(noise) - 1) / own - 1) for own in noise.values()
    ]

    assert [min(errors), max(errors)] == pytest.approx([0.022, 0.184], abs=0.005)
