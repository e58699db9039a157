"""Scavenger's search against an oracle: choices by forecasts, judged by all measurements."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from benchmarks.papers import search
from benchmarks.papers.search import SEARCHES, MeasuredJob, jobs_of, rows_of, table

from evenstride._version import __version__
from evenstride.planner.online_forecast import Configuration
from evenstride.planner.workload.model_store import StoredModel, keep, read_store
from tests.unit.planner.workload.jobs import by_noise, device, job, stored

SIZES = (8, 16, 32, 64, 128)


def exact(parameters: int, fixed_s: float, least: float = 4.0) -> list[StoredModel]:
    """Return the two files of a job whose steps and epochs are exactly on their lines."""
    name = f"train.py net {parameters}"
    steps = job(parameters, name, devices=(device("thread", fixed_s, 1e-3, SIZES),))
    trainings = by_noise(least, 500.0)
    return stored(steps, job(parameters, name, trainings=trainings, target="loss 1"))


def both(*jobs: list[StoredModel]) -> list[StoredModel]:
    return [
        StoredModel(Path(f"{n}.json"), one.profile)
        for n, one in enumerate(one for each in jobs for one in each)
    ]


def test_a_configuration_is_compared_only_if_its_share_was_measured() -> None:
    (only,) = jobs_of(exact(1000, 0.01))

    possible = only.possible()

    assert only.name == "net 1000"
    assert Configuration(1, 64) in possible and Configuration(8, 64) in possible
    assert Configuration(1, 256) not in possible, "256 samples on one worker were not measured"
    assert Configuration(2, 256) in possible and Configuration(8, 1024) in possible


def test_the_measured_time_is_epochs_times_steps_times_step() -> None:
    (only,) = jobs_of(exact(1000, 0.01))

    (time_s,) = only.measured_s([Configuration(1, 64)])

    epochs = 4.0 * (1 + 64 / 500)
    assert time_s == pytest.approx(epochs * 782 * (0.01 + 0.064))  # 50,000 samples in 782 steps


def test_searches_of_exact_jobs_choose_as_the_oracle() -> None:
    rows = list(rows_of(both(exact(1000, 0.01), exact(950, 0.01), exact(900, 0.01))))

    assert {row.search for row in rows} == set(SEARCHES)
    assert len(rows) == 3 * len(SEARCHES) * 3
    for row in rows:
        assert row.error < 0.02, row
        assert (row.chosen, row.time_above, row.cost_above) == (row.best, 0.0, 0.0), row


def test_a_job_is_not_forecast_from_itself() -> None:
    odd = exact(800, 0.2)
    rows = list(rows_of(both(exact(1000, 0.001), exact(950, 0.001), odd)))

    errors = {row.search: row.error for row in rows if row.job == "net 800"}

    assert errors["similar job"] > 0.1 and errors["universal model"] > 0.1
    assert errors["full"] < 0.02


def test_partial_search_knows_only_the_extremes() -> None:
    bent = exact(1000, 0.01)
    points = list(bent[0].profile.devices[0].points)
    # Its step of 16 samples is between those of the smallest and the largest configuration.
    points[1] = points[1].model_copy(update={"step_s": 1.0})
    measured = bent[0].profile.devices[0].model_copy(update={"points": tuple(points)})
    job_bent = MeasuredJob(
        "bent", bent[0].profile.model_copy(update={"devices": (measured,)}), bent[1].profile
    )
    (plain,) = jobs_of(exact(1000, 0.01))
    choices = plain.possible()
    ends = [Configuration(1, 64), Configuration(8, 1024)]

    assert job_bent.searched_s(choices, ends) == plain.searched_s(choices, ends)
    assert job_bent.searched_s(choices, choices) != plain.searched_s(choices, choices)


def test_the_stored_results_are_those_of_the_stored_profiles() -> None:
    models = read_store(search.PROFILES, __version__, "", force=True).models

    for was, now in zip(search.stored(), rows_of(models), strict=True):
        figures = ("time_above", "cost_above", "error")
        assert {**asdict(was), **dict.fromkeys(figures)} == {
            **asdict(now),
            **dict.fromkeys(figures),
        }
        assert [getattr(was, one) for one in figures] == pytest.approx(
            [getattr(now, one) for one in figures], abs=1e-6
        )


def test_the_command_stores_prints_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "FILE", tmp_path / "search.json")
    for one in both(exact(1000, 0.01), exact(950, 0.01), exact(900, 0.01)):
        keep(one.profile, tmp_path / "store")

    command = ["--profiles", str(tmp_path / "store"), "--json", "--draw", str(tmp_path / "a.svg")]
    assert search.main(command) == 0

    assert json.loads(capsys.readouterr().out) == [asdict(row) for row in search.stored()]
    assert "oracle" in (tmp_path / "a.svg").read_text()
    assert [row[0] for row in table(search.stored()).rows] == list(SEARCHES)
    assert search.main(["--profiles", str(tmp_path / "nowhere")]) == 2
