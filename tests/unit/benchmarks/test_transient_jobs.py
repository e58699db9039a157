"""The replay of a bag of jobs on transient machines: what is paid, and what fails."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks import transient_jobs
from benchmarks.transient_jobs import Bill, Costs, run_bag

from evenstride.core.reliability import Bathtub, Exponential, Lifetime
from evenstride.sim.scenario.recordings import SpotTrace
from tests.messages import check_message

MODEL = Exponential(100.0)
COSTS = Costs(start_s=2.0, every_s=np.inf, save_s=1.0)


def bag(
    work_s: list[float],
    lives_s: list[float],
    way: str,
    model: Lifetime = MODEL,
    costs: Costs = COSTS,
) -> Bill:
    return run_bag(np.array(work_s), iter(lives_s), way, model, costs)


def test_a_new_machine_for_each_job_pays_each_start() -> None:
    assert bag([10.0, 20.0], [50.0, 50.0], "new") == Bill(30.0, 34.0, 2, 0, 2, 0)


def test_a_machine_that_takes_any_job_works_until_it_is_lost() -> None:
    # The first takes 10 s of work and is lost 3 s before the end of the second job.
    assert bag([10.0, 20.0], [29.0, 50.0], "any") == Bill(30.0, 29.0 + 22.0, 3, 1, 2, 0)


def test_a_machine_that_is_lost_during_its_start_is_paid() -> None:
    assert bag([10.0], [1.0, 50.0], "any") == Bill(10.0, 1.0 + 12.0, 1, 0, 2, 0)


def test_a_killed_job_goes_on_from_its_last_save() -> None:
    often = Costs(start_s=2.0, every_s=4.0, save_s=1.0)

    # After 10 s of work and saves the machine is lost; 8 of 10 s of work are saved.
    bill = bag([10.0], [12.0, 50.0], "any", costs=often)

    assert bill == Bill(10.0, 12.0 + 4.0, 2, 1, 2, 0)
    assert bag([10.0], [14.0], "any", costs=often).paid_s == 2.0 + 10.0 + 2 * 1.0


def test_a_placed_job_avoids_the_end_of_a_machine() -> None:
    tub = Bathtub(a=0.3, tau1_s=5.0, tau2_s=1.0, b_s=100.0, max_life_s=110.0)

    any_job = bag([60.0, 60.0], [100.0, 200.0], "any", tub)
    placed = bag([60.0, 60.0], [100.0, 200.0], "placed", tub)

    assert (any_job.failed, any_job.paid_s) == (1, 100.0 + 62.0)
    assert placed == Bill(120.0, 62.0 + 62.0, 2, 0, 2, 1)


@pytest.fixture
def only_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use no recordings."""
    monkeypatch.setattr(transient_jobs, "groups", dict)


@pytest.mark.usefixtures("only_drawn")
def test_on_the_published_curve_placed_jobs_fail_less_and_cost_less(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["--seeds", "2", "--jobs", "50", "--hours", "4", "--json"]
    outputs = []
    for _ in range(2):
        assert transient_jobs.main(command) == 0
        outputs.append(capsys.readouterr().out)

    ways = json.loads(outputs[0])["bathtub"]["ways"]
    assert outputs[0] == outputs[1], "the same seeds give the same figures"
    assert ways["placed"]["failed_part"] < 0.7 * ways["any"]["failed_part"]
    assert ways["any"]["failed_part"] < ways["new"]["failed_part"]
    assert ways["placed"]["cost"] < ways["any"]["cost"]
    assert ways["placed"]["given_back"] > 0 == ways["any"]["given_back"]
    for way in ways.values():
        assert way["cost"] == pytest.approx(0.2 * (1.0 + way["overhead"]))


@pytest.mark.usefixtures("only_drawn")
def test_the_table_has_a_row_and_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    transient_jobs.main(["--seeds", "1", "--jobs", "5"])

    _, _, row, reason = capsys.readouterr().out.splitlines()
    assert row.count("|") == 11
    assert reason.startswith("bathtub: a bathtub, with losses early")


@pytest.mark.usefixtures("only_drawn")
def test_a_job_longer_than_any_machine_lives_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert transient_jobs.main(["--hours", "40"]) == 2

    check_message(capsys.readouterr().err)


def test_impossible_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        transient_jobs.parse(["--hours", "0"])

    check_message(capsys.readouterr().err.partition("error: ")[2])


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("a/us-east-1a_v100_1", ("p3.2xlarge", "us-east-1")),
        ("a/us-central1-a_c3-88", ("c3-highcpu-88", "us-central1")),
        ("a/us-west-2b_k80_8", ("p2.8xlarge", "us-west-2")),
    ],
)
def test_a_price_is_that_of_the_type_in_its_region(name: str, key: tuple[str, str]) -> None:
    trace = SpotTrace(name, 60.0, np.zeros(1, dtype=np.int64))

    assert transient_jobs.price_of(trace, {key: 0.3}) == 0.3


@pytest.mark.data
def test_half_of_each_recording_is_for_the_model_and_half_for_the_replay(
    data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = np.array([0, 1, 1, 0] * 8 + [0, 1, 1, 1, 1, 1, 1, 0] * 8)
    trace = SpotTrace("group/us-east-1a_v100_1", 60.0, np.concatenate([up[:32], up[32:64]]))
    monkeypatch.setenv("EVENSTRIDE_DATA", str(data_root))
    monkeypatch.setattr(transient_jobs, "load_spot_traces", lambda: (trace,))
    monkeypatch.setattr(transient_jobs, "FEWEST", 4)

    seen, (pool,) = transient_jobs.groups()["group"]

    assert set(seen.age_s) == {1.5 * 60.0}
    assert set(pool.lives_s) == {5.5 * 60.0}
    assert pool.price == pytest.approx(0.2), "0.612 of 3.06 USD per hour"
