"""The evaluation of forecasts, on synthetic runs with known times."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.forecast_judging import (
    interpolated,
    mean_epochs,
    pick,
    picked,
    scatter,
    stepped,
    timed,
    trained,
)

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.time_model.estimates import TimeModel

BATCHES = (64, 256, 1024)
LATENCY_S, BYTES_PER_S, BYTES = 1e-3, 1e8, 4e5


def run(per_sample_s: tuple[float, ...], slower: float = 1.0, hosts: bool = False) -> Any:
    """Return the report of workers without noise, with 2 ms of fixed time."""
    workers = len(per_sample_s)
    model = TimeModel.affine([0.002] * workers, list(per_sample_s))
    reduce_s = 2 * (workers - 1) * (LATENCY_S + BYTES / workers / BYTES_PER_S)

    def step_s(batch: int) -> float:
        low, high = (__import__("numpy").full(workers, end) for end in (1, batch))
        return float(model.at(equal_finish(model, low, high, batch)).max()) + reduce_s

    sizes = [[(size, [0.002 + each_s * size] * 3) for size in (10, 90)] for each_s in per_sample_s]
    calibration = {"steps_s": sizes}
    return {
        "workload": "text",
        "workers": workers,
        "hosts": hosts,
        "usd_per_h": [0.5] * workers,
        "batches": BATCHES,
        "gradient_bytes": BYTES,
        "blocks": [{"steps_s": [slower * step_s(batch)] * 4} for batch in BATCHES],
        "blocks_between": 1,
        "calibrations": [calibration] * (len(BATCHES) + 1),
    }


ONE, TWO, FOUR = (1e-4,), (1e-4, 2e-4), (1e-4, 1e-4, 2e-4, 4e-4)


def trainings(least: float = 2.0, noise: float = 500.0) -> list[Any]:
    return [
        {"batch": b, "epochs": least * (1 + b / noise), "noise": None, "seed": 0} for b in BATCHES
    ]


def test_steps_are_forecast_from_calibrations_and_from_links_of_other_numbers_of_workers() -> None:
    runs = [run(ONE), run(TWO), run(FOUR), run((*FOUR, *FOUR))]

    assert max(abs(row.error) for row in stepped(runs)) < 0.005  # the least error of a curve


def test_a_mix_that_is_slower_than_its_calibrations_is_off_by_as_much() -> None:
    runs = [run(ONE), run(TWO, slower=1.25), run(FOUR), run((*FOUR, *FOUR))]

    rows = [row for row in stepped(runs) if row.workers == 2]

    assert [row.error for row in rows] == pytest.approx([-0.2] * 3, abs=0.005)


def late(found: Any, by_s: float) -> Any:
    """Return a run whose steps take ``by_s`` longer."""
    blocks = [{"steps_s": [step_s + by_s for step_s in one["steps_s"]]} for one in found["blocks"]]
    return {**found, "blocks": blocks}


def test_a_mixs_own_communication_is_left_out_and_that_of_others_counts() -> None:
    runs = [run(ONE), run(TWO), late(run(FOUR), 1.0)]

    off = {row.workers: row.error for row in stepped(runs) if row.batch == 1024}

    assert off[4] < -0.8  # its own slow communication does not count
    assert off[2] > 1.0  # it is forecast from the slow one only
    assert abs(off[1]) < 0.005


def test_hosts_do_not_affect_workers_on_one_host() -> None:
    runs = [run(TWO), run(FOUR)]

    assert stepped([*runs, late(run(FOUR, hosts=True), 1.0)])[:6] == stepped(runs)


def test_a_time_is_forecast_from_other_batches_and_never_beyond_them() -> None:
    rows = list(timed(stepped([run(TWO), run(FOUR)]), {"text": trainings()}, samples=10_000))

    assert {row.step.batch for row in rows} == {256}
    assert all(row.forecast_epochs.value == pytest.approx(2 * (1 + 256 / 500)) for row in rows)
    assert all(row.steps_each == 40 for row in rows)
    assert rows[0].real_s == pytest.approx(rows[0].real_epochs * 40 * rows[0].step.real_s)


def test_a_batch_that_needs_more_than_the_law_says_is_off_by_as_much() -> None:
    odd = [
        {**one, "epochs": one["epochs"] * (2 if one["batch"] == 256 else 1)} for one in trainings()
    ]

    row = next(timed(stepped([run(TWO), run(FOUR)]), {"text": odd}, samples=10_000))

    assert row.forecast_epochs.value / row.real_epochs == pytest.approx(0.5)
    assert row.plain_epochs / row.real_epochs == pytest.approx(0.5)


def test_trainings_that_did_not_reach_the_loss_do_not_count() -> None:
    runs = trained([*trainings(), {"batch": 64, "epochs": None, "noise": 3.0}])

    assert len(runs) == 3
    assert mean_epochs(runs)[64] == pytest.approx(2 * (1 + 64 / 500))


def test_the_baseline_is_a_line_between_the_ends() -> None:
    assert interpolated({64: 2.0, 256: 9.0, 1024: 4.0}, 544) == pytest.approx(3.0)


def test_scatter_is_between_successive_steps_and_excludes_drift() -> None:
    drifting = [1.0 + 0.001 * at for at in range(100)]
    assert scatter([drifting]) < 0.01
    assert scatter([[1.0, 1.2] * 20]) > 0.1


@pytest.mark.parametrize(("objective", "at"), [("time", 0), ("cost", 3), ("knee", 1)])
def test_the_best_is_the_least_or_the_knee_of_those_that_no_other_beats(
    objective: str, at: int
) -> None:
    times_s, usd = [1.0, 1.2, 5.0, 9.0, 9.5], [10.0, 3.0, 2.5, 2.0, 8.0]
    assert pick(objective, times_s, usd) == at


def test_a_choice_is_judged_by_what_was_measured() -> None:
    """The mix that was slower than forecast is chosen, and its excess is reported."""
    rows = stepped([run(ONE), run(TWO), run(FOUR, slower=4.0)])

    found = {one.objective: one for one in picked(rows, trainings(), BATCHES, 10_000)}

    assert found["time"].chosen[0] == 4
    assert found["time"].best[0] < 4
    assert found["time"].time_above > 0.5
