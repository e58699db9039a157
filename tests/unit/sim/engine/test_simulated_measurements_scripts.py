"""The scripts that measure predictors and fidelity: what they refuse, and what they pair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks import claims, fidelity, predictors, suite, unseen
from pydantic import ValidationError

from evenstride.cli.arguments import split_policies
from evenstride.core.fleet import FloatArray
from evenstride.sim.scenario.scenario_model import WorkerGroup
from tests.messages import check_message


@pytest.mark.parametrize(
    "arguments",
    [
        ["--speeds", "1"],
        ["--speeds", "1,2"],
        ["--steps", "1"],
        ["--rounds", "1"],
    ],
)
def test_a_comparison_that_leaves_nothing_to_compare_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        fidelity.parse(arguments)

    check_message(capsys.readouterr().err)


def recording(folder: Path, **days: dict[str, list[int]]) -> None:
    """Write machines by name, each with its load in percent, in the order of each day."""
    (folder / "traces").mkdir()
    columns = {f"vm_{day}": np.array(list(loads)) for day, loads in days.items()}
    columns |= {f"cpu_{day}": np.array(list(loads.values())) for day, loads in days.items()}
    np.savez(folder / "traces" / "planetlab-cpu.npz", allow_pickle=False, **columns)


def test_the_days_of_a_replayed_machine_are_put_together_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording(
        tmp_path,
        d1={"gone": [1, 1], "busy": [0, 80], "calm": [10, 20]},
        d2={"calm": [30, 20], "new": [9, 9], "busy": [50, 0]},
    )
    monkeypatch.setenv("EVENSTRIDE_DATA", str(tmp_path))

    busy, calm = predictors.planetlab()

    assert busy[:, 0] / predictors.BATCH == pytest.approx([1.0, 0.2, 0.5, 1.0])
    assert calm[:, 0] / predictors.BATCH == pytest.approx([0.9, 0.8, 0.7, 0.8])
    assert busy[:, 1] == pytest.approx([np.nan, 0.0, np.nan, 0.5], nan_ok=True)


def test_without_the_recording_the_predictors_stop_before_they_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_DATA", str(tmp_path))

    with pytest.raises(SystemExit, match="set EVENSTRIDE_DATA"):
        predictors.planetlab()


def test_no_worker_is_predicted_by_a_network_that_was_fitted_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    series = np.ones((3, 5, 3)) * np.arange(3)[:, None, None]
    pairs: list[tuple[set[float], set[float]]] = []

    def seen(_name: str, mine: FloatArray, others: FloatArray) -> FloatArray:
        pairs.append((set(mine.ravel()), set(others.ravel())))
        return mine[:, :, 0]

    monkeypatch.setattr(predictors, "taught_on", lambda _name, others: others)
    monkeypatch.setattr(predictors, "predictions", seen)

    reported = predictors.held_out("narx", series)

    assert pairs == [({0.0}, {1.0, 2.0}), ({1.0}, {0.0, 2.0}), ({2.0}, {0.0, 1.0})]
    assert (reported == series[:, :, 0]).all()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--count", "0"], "at least one"),
        (["--first", "-1"], "numbered from 0"),
        (["--policies", "adaptive"], "another one"),
        (["--policies", "magic"], "magic"),
        (["--classes", "mixed,magic"], "'magic'"),
    ],
)
def test_invalid_comparisons_in_unseen_scenarios_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unseen.main(arguments) == 2
    assert complaint in capsys.readouterr().err


def test_a_random_scenario_without_a_split_is_left_out() -> None:
    number = 1891  # its two remaining workers may not have the whole batch

    with pytest.raises(ValidationError, match="cannot be split"):
        unseen.scenario(number)
    assert unseen.perform((number, ("uniform",))) == (number, ())


@pytest.mark.parametrize("benchmark", ["unseen", "suite", "claims"])
def test_the_window_of_the_authors_of_dynamic_batching_is_among_the_published(
    benchmark: str,
) -> None:
    """Their code waits 10 steps between changes, the policy's default 1."""
    policies = {
        "unseen": split_policies(unseen.OTHERS, "--policies"),
        "suite": suite.default_policies(),
        "claims": claims.MIXES["h10"],
    }[benchmark]

    assert {"dynamic-batching", "dynamic-batching:window=10"} <= set(policies)


def test_a_number_makes_the_same_unseen_scenario_always_and_another_one_another() -> None:
    made = [unseen.scenario(number) for number in range(200)]

    assert made == [unseen.scenario(number) for number in range(200)]
    assert len({one.model_dump_json(exclude={"name"}) for one in made}) == 200
    kinds = {event.kind for one in made for event in one.events}
    assert kinds >= {"step", "ramp", "leave", "periodic", "bursty", "walk", "wave"}
    assert {one.exchange.every for one in made} == {1, 5, "leader"}


UNUSUAL = {
    "first-steps": "new_share_s",
    "waves": "wave",
    "cliffs": "cliff_at",
}


@pytest.mark.parametrize(("name", "field"), UNUSUAL.items())
def test_unseen_scenarios_of_a_class_have_what_it_is_about(name: str, field: str) -> None:
    made = [unseen.scenario(number) for number in range(70) if unseen.class_of(number) == name]

    assert len(made) == 10
    usual = WorkerGroup.model_fields[field].default
    assert all(any(getattr(kind, field) != usual for kind in one.workers) for one in made)


def test_unseen_noise_is_of_every_kind() -> None:
    numbers = (number for number in range(280) if unseen.class_of(number) == "noise")
    kinds = [unseen.scenario(number).workers[0] for number in numbers]

    assert {kind.noise for kind in kinds} == {0.1, 0.15, 0.2, 0.3}
    for field in ("noise_correlation", "noise_tail", "noise_common"):
        assert {bool(getattr(kind, field)) for kind in kinds} == {False, True}


def test_a_policy_behind_in_an_unseen_scenario_is_marked_in_real_time() -> None:
    number, (equal, ours) = unseen.perform((7, ("uniform", "adaptive")))
    other = replace(equal, policy="dbs", efficiency=0.5, efficiency_mean=0.9)
    ours = replace(ours, efficiency=0.51, efficiency_mean=0.3, informed_real=0.6, speedup=2.0)
    best = replace(other, policy="omnilearn", efficiency=0.54)

    ahead = unseen.Compared.of(number, (ours, other, equal))
    behind = unseen.Compared.of(number, (ours, other, best))

    assert ahead.published == pytest.approx(0.02)
    assert ahead.best == "dbs"
    assert (ahead.equal, ahead.equal_is_best) == (1.0, False)
    assert ahead.informed == pytest.approx(0.85)
    assert "+2.00% of dbs" in str(ahead)
    assert not str(ahead).endswith("behind")
    assert str(behind).endswith("behind")


def test_the_verdict_in_unseen_scenarios_is_on_each_target() -> None:
    good = unseen.Compared(0, 0.02, "dbs", 0.1, False, 0.995, 0.99)
    lines = list(unseen.verdicts([good] * 20))
    bad = replace(good, published=-0.02, equal=-0.01, equal_is_best=True, informed=0.9)
    worse = list(unseen.verdicts([good, bad, bad]))

    assert [line.split()[0] for line in lines] == ["kept"] * 4
    assert [line.split()[0] for line in worse] == ["MISSED"] * 5
    assert "published: least lead -2.00% (at least -1.00%)" in worse[0]


def measured(slower: float) -> fidelity.Row:
    """Return what two workers measured whose machine became slower in the second round's first."""
    curve = [[(16, 0.05), (48, 0.09), (64, 0.11)], [(16, 0.09), (32, 0.15), (64, 0.27)]]
    calibrations = [
        {
            "steps_s": [[(size, [f * s] * 4) for size, s in worker] for worker in curve],
            "communication_s": 0.01 * f,
        }
        for f in (1.0, 1.0, 1.0, slower, slower)
    ]
    # The slower one's 64 of 128 samples, or both of 96 and 32 together, and averaging.
    by_block = zip((1.0, 1.0, (1.0 + slower) / 2, slower), (0.27, 0.15) * 2, strict=True)
    blocks = [[f * (step_s + 0.01)] * 3 for f, step_s in by_block]
    return {"batch": 128, "blocks": blocks, "calibrations": calibrations}


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_steps_that_are_as_calibrated_are_predicted_whatever_the_machine_does(
    slower: float,
) -> None:
    uniform, adaptive = fidelity.judged("1,0.5", measured(slower))

    assert uniform["error"] == pytest.approx(0.0, abs=0.005)
    assert adaptive["error"] == pytest.approx(0.0, abs=0.02)
    assert adaptive["drift"] == pytest.approx(slower - 1.0)


def test_the_error_is_that_of_what_is_simulated() -> None:
    report = measured(1.0)
    report["blocks"] = [[2.0 * t for t in block] for block in report["blocks"]]

    for row in fidelity.judged("1,0.5", report):
        assert row["error"] == pytest.approx(-0.5, abs=0.01)
        assert row["standard_error"] == pytest.approx(0.0, abs=0.001)


def test_the_error_is_that_of_the_mean_step_of_all_blocks() -> None:
    report = measured(1.0)
    uniform, adaptive = fidelity.judged("1,0.5", report)
    first_s, *others_s = report["blocks"]
    report["blocks"] = [[2.0 * first_s[0], 2.0 * first_s[1], 5.0 * first_s[2]], *others_s]

    slower, same = fidelity.judged("1,0.5", report)

    assert same == adaptive
    assert slower["simulated_s"] == uniform["simulated_s"] == pytest.approx(0.28, rel=0.005)
    assert slower["real_s"] == pytest.approx(0.28 * (3.0 + 1.0) / 2)
    assert slower["error"] == pytest.approx(1 / 2 - 1, abs=0.005)
    # The first block's error is -2/3, the other one's 0: half their difference.
    assert slower["standard_error"] == pytest.approx(1 / 3, abs=0.005)


def test_the_machine_drifts_from_its_quickest_calibration_to_its_slowest() -> None:
    assert fidelity.judged("1,0.5", measured(0.8))[0]["drift"] == pytest.approx(1 / 0.8 - 1)


def test_a_block_is_predicted_by_the_mean_times_and_the_noise_of_the_calibrations() -> None:
    report = measured(1.0)
    for calibration in report["calibrations"]:
        slow = [(size, [s, 2 * s, s, 4 * s]) for size, (s, *_) in calibration["steps_s"][1]]
        calibration["steps_s"][1] = slow

    calm, one = fidelity.scenario("1,0.5", measured(1.0), 0).workers
    also_calm, uneven = fidelity.scenario("1,0.5", report, 0).workers

    assert also_calm == calm
    assert uneven.samples_per_s == pytest.approx(one.samples_per_s / 2)
    assert one.noise == 0.0
    assert uneven.noise == pytest.approx(0.5 / (0.6745 * 2**0.5))


def test_scatter_between_steps_is_noise_and_rare_spikes_are_not() -> None:
    report, rng = measured(1.0), np.random.default_rng(0)
    for calibration in report["calibrations"]:
        second = calibration["steps_s"][1]
        scatter = 1.0 + 0.05 * rng.standard_normal((len(second), 200))
        scatter[:, ::50] *= 3.0
        calibration["steps_s"][1] = [
            (size, list(times_s[0] * parts))
            for (size, times_s), parts in zip(second, scatter, strict=True)
        ]

    assert fidelity.noise(report, 0) == 0.0
    assert fidelity.noise(report, 1) == pytest.approx(0.05 * 200 / 208, rel=0.1)
