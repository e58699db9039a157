"""The shipped scenarios load and run and say what their sources say; the suite judges rightly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks import judging, suite

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.allocation.speedup import linear_bound
from evenstride.core.fleet import FloatArray
from evenstride.core.policies import policy_from_spec
from evenstride.errors import ScenarioError
from evenstride.sim.engine.lockstep import Simulation
from evenstride.sim.engine.virtual_workers import Cluster
from evenstride.sim.scenario.recordings import load_recording
from evenstride.sim.scenario.scenario_file import changed, load_scenario
from evenstride.sim.scenario.scenario_model import Scenario
from evenstride.sim.scenario.timeline import Timeline
from evenstride.sim.scoring.suite import ScoredScenario, ScoreRow
from tests.messages import check_message, raises_message

PATHS = sorted(suite.SCENARIOS.glob("*.yaml"))
RECORDED = {path for path in PATHS if "kind: replay" in path.read_text()}
each_scenario = pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.data] if p in RECORDED else []) for p in PATHS],
    ids=lambda path: path.stem,
)


def scenario(name: str) -> Scenario:
    return load_scenario(suite.SCENARIOS / f"{name}.yaml")


def shortened(whole: Scenario, steps: int) -> Scenario:
    return changed(whole, {"steps": steps})


def usual_speeds(name: str) -> FloatArray:
    return np.asarray(1.0 / Cluster(scenario(name), 0).usual.per_sample_s)


@pytest.fixture
def recordings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scenarios of this test find the recording that they replay."""
    path = request.node.callspec.params["path"]
    if path in RECORDED:
        monkeypatch.setenv("EVENSTRIDE_DATA", str(request.getfixturevalue("data_root")))


@each_scenario
@pytest.mark.usefixtures("recordings")
def test_a_scenario_is_named_as_its_file_and_says_what_is_assumed(path: Path) -> None:
    loaded = load_scenario(path)

    assert loaded.name == path.stem
    assert "Assumed:" in loaded.about


@each_scenario
@pytest.mark.usefixtures("recordings")
def test_a_scenario_runs(path: Path) -> None:
    few_steps = shortened(load_scenario(path), 6)

    track = Simulation(few_steps, policy_from_spec("adaptive"), seed=0).run()

    assert (track.mean_s > 0).all()
    assert all(split.sum() == few_steps.global_batch for split in track.splits)


@each_scenario
@pytest.mark.usefixtures("recordings")
def test_the_events_of_a_scenario_are_computed_to_its_end(path: Path) -> None:
    whole = load_scenario(path)

    timeline = Timeline(whole, seed=0)

    assert bool(timeline.changes) == bool(whole.events)
    assert (timeline.speed(whole.steps - 1) > 0).all()
    assert len(timeline.present(whole.steps - 1)) > 1


def test_the_suite_holds_what_the_comparison_is_made_on() -> None:
    published = {"h1", "h2", "h6", "h10", "t4-p4-1024", "t4-p4-2048", "p100-xeon"}
    published |= {"lb-bsp-cpu-mix", "omnilearn-schedule", "dbs-disturbance", "lbb-four-gpus"}
    loads = {"load-20110303", "load-20110322", "load-20110412", "load-64"}
    ours = {"equal-8", "equal-64", "equal-1000", "mixed-1000", "mixed-10000", "reference"}

    assert published | loads | ours <= {path.stem for path in PATHS}


@pytest.mark.parametrize(
    ("name", "cores", "bound"),
    [
        ("h1", [13, 13, 13], 1.0),
        ("h2", [9, 12, 18], 1.44),
        ("h6", [4, 11, 24], 3.25),
        ("h10", [2, 17, 20], 6.5),
    ],
)
def test_h_levels_have_39_cores_and_speeds_in_proportion_to_them(
    name: str, cores: list[int], bound: float
) -> None:
    declared = [worker.cores for worker in Cluster(scenario(name), 0).workers]
    speeds = usual_speeds(name)

    assert declared == cores
    assert speeds / speeds.sum() == pytest.approx(np.array(cores) / 39)
    assert linear_bound(speeds) == pytest.approx(bound, abs=0.005)


def test_p100_and_xeon_are_as_fast_and_declare_as_much_as_the_paper_splits() -> None:
    speeds = usual_speeds("p100-xeon")
    declared = [worker.flops_per_s for worker in Cluster(scenario("p100-xeon"), 0).workers]

    assert speeds / speeds.sum() == pytest.approx([0.813, 0.187])
    assert declared[0] is not None
    assert declared[1] is not None
    assert declared[0] / (declared[0] + declared[1]) == pytest.approx(0.813, abs=0.001)
    assert linear_bound(speeds) == pytest.approx(2.67, abs=0.005)


@pytest.mark.parametrize("name", ["t4-p4-1024", "t4-p4-2048"])
def test_t4_and_p4_declare_half_precision_as_the_paper_splits_by(name: str) -> None:
    declared = [worker.flops_per_s or 0.0 for worker in Cluster(scenario(name), 0).workers]
    speeds = usual_speeds(name)

    assert declared == [65e12, 65e12, 5.5e12, 5.5e12]
    assert linear_bound(np.array(declared)) == pytest.approx(6.4, abs=0.05)
    assert linear_bound(speeds) == pytest.approx(1.5)  # as assumed
    static = ScoredScenario.of(shortened(scenario(name), 50), 0).run("static")[0]
    assert 1.0 < static.speedup < 1.15, "FLOP/s mislead the static split"


def test_lbb_gpus_take_the_times_of_the_paper_and_are_best_split_as_it_says() -> None:
    curves = Cluster(scenario("lbb-four-gpus"), 0).usual
    balanced = np.array([167, 167, 158, 20])

    equal_ms = curves.at(np.full(4, 128)) * 1e3
    best = equal_finish(curves, np.ones(4, np.int64), np.full(4, 512), 512)

    assert equal_ms == pytest.approx([81.8, 81.5, 85.4, 392.9], abs=0.1)
    assert curves.at(balanced) * 1e3 == pytest.approx([104.0] * 4, abs=0.1)
    assert np.abs(best - balanced).max() <= 1


def test_omnilearns_schedule_gives_every_level_its_cores() -> None:
    loaded = scenario("omnilearn-schedule")
    assert (loaded.steps, loaded.epoch_of(loaded.steps)) == (900, 45)
    timeline = Timeline(loaded, 0)
    levels = {1: [12, 12, 12, 12], 2: [12, 12, 8, 16], 4: [9, 9, 6, 24], 8: [6, 6, 4, 32]}

    phases = enumerate((1, 2, 4, 8, 8, 4, 2, 1, 1))
    for phase, level in phases:  # the last level has twice the epochs
        for step in (100 * phase, 100 * phase + 99):
            cores = 12 * timeline.speed(step)

            assert cores == pytest.approx(np.array(levels[level]), abs=0.001), f"step {step}"


def test_the_disturbance_test_strikes_as_often_and_as_hard_as_in_the_source() -> None:
    steps_per_epoch, epoch_s = 10, 20
    strikes = scenario("dbs-disturbance").events

    assert {event.kind for event in strikes} == {"bursty"}
    chances = [steps_per_epoch / event.model_dump()["mean_gap"] for event in strikes]
    slowed_s = [epoch_s / event.model_dump()["speed"] - epoch_s for event in strikes]
    epochs = [event.model_dump()["mean_steps"] / steps_per_epoch for event in strikes]
    assert sum(chances) == pytest.approx(0.1)
    assert slowed_s == pytest.approx([5, 10], abs=0.01)
    assert epochs == [12, 12]


def row(policy: str, seed: int, efficiency: float, steps: int | None = 2) -> ScoreRow:
    return ScoreRow(
        scenario="reference",
        policy=policy,
        lag=1,
        seed=seed,
        efficiency=efficiency,
        efficiency_mean=efficiency,
        informed=1.0,
        informed_real=1.0,
        efficiency_settled=efficiency,
        speedup=1.0,
        bound=1.0,
        linear_bound=1.0,
        steps_to_95_cold=steps,
        steps_to_95_after_change=steps,
        needless_changes=0,
        decide_s=0.0,
    )


def place(**efficiencies: list[float]) -> judging.Place:
    rows = {
        policy: tuple(row(policy, seed, value) for seed, value in enumerate(values))
        for policy, values in efficiencies.items()
    }
    return judging.Place("reference", 1, (True,) * len(efficiencies["adaptive"]), rows)


@pytest.mark.parametrize(("ours", "marked"), [(0.989, "FLAG noisy"), (0.991, ""), (1.01, "")])
def test_adaptive_is_flagged_when_it_is_behind_by_more_than_a_hundredth(
    ours: float, marked: str
) -> None:
    assert judging.marks(place(adaptive=[ours], dbs=[1.0])) == marked


def test_adaptive_is_marked_low_when_an_informed_controller_does_much_better() -> None:
    assert judging.marks(place(adaptive=[0.984], dbs=[0.5])) == "low"


def test_the_verdict_tells_much_behind_from_a_little_behind_and_counts_the_noisy() -> None:
    little, much = place(adaptive=[0.995], dbs=[1.0]), place(adaptive=[0.5], dbs=[1.0])

    one, both = judging.verdict([little]), judging.verdict([little, much])

    check_message(one, "1%")
    check_message(both, "1%")


def test_adaptive_alone_gets_no_verdict() -> None:
    assert "no other policy" in judging.verdict([place(adaptive=[1.0])])


def test_the_best_of_the_others_is_the_best_on_average_over_the_seeds() -> None:
    seen = judging.compare(place(adaptive=[1, 1], dbs=[1.0, 0.5], uniform=[0.8, 0.8]), "efficiency")

    assert seen is not None
    assert seen.best == "uniform"
    assert seen.ahead == pytest.approx(0.25)


def test_differences_are_paired_by_seed() -> None:
    others = [0.5, 0.9, 0.7]

    seen = judging.compare(place(adaptive=[0.98 * other for other in others], dbs=others))

    assert seen is not None
    assert seen.ahead == pytest.approx(-0.02)
    assert seen.interval == pytest.approx((-0.02, -0.02))


def steps_checks(found: list[int | None], changes: list[bool]) -> list[judging.Check]:
    rows = tuple(row("adaptive", seed, 0.99, steps) for seed, steps in enumerate(found))
    seen = judging.Place("reference", 1, tuple(changes), {"adaptive": rows})
    return [check for check in judging.checks([seen]) if "steps" in check.name]


def test_seeds_that_never_find_the_split_fail_the_checks_on_steps() -> None:
    cold, change = steps_checks([2] * 8 + [None] * 2, [True] * 10)

    assert (cold.kept, change.kept) == (False, False)
    assert (cold.seen, change.seen) == ("2/never", "2/never")


def test_a_seed_without_a_change_does_not_count_as_never_found_after_one() -> None:
    cold, change = steps_checks([2, 2, 3, None], [True, True, True, False])

    assert (cold.kept, change.kept) == (False, True)
    assert change.seen == "2/3"


def test_the_shown_steps_are_the_judged_ones() -> None:
    cold, _ = steps_checks([4, 5], [True, True])

    assert (cold.seen, cold.kept) == ("4/5", True)


TINY = "{name: tiny, global_batch: 8, steps: 4, workers: [{samples_per_s: 10}]}"


def in_folder(monkeypatch: pytest.MonkeyPatch, folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    monkeypatch.setattr(suite, "SCENARIOS", folder)


def test_a_policy_that_a_scenario_cannot_serve_is_left_out_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_folder(monkeypatch, tmp_path, tiny=TINY)
    asked = suite.parse(["--policies", "static:cores,uniform", "--seeds", "1", "--lags", "1"])

    planned = suite.plan(asked)
    (task,) = suite.tasks_of(asked, planned.casts)
    outcome = suite.perform(task)

    assert [row.policy for row in outcome.rows] == ["adaptive", "uniform"]
    assert [one.policy for one in planned.casts[0].unfit] == ["static:cores"]


def test_an_unknown_policy_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = suite.main(["--policies", "dbss", "--only", "h2"])

    assert code == 2
    assert "unknown policy 'dbss'" in capsys.readouterr().err


def test_without_the_recording_its_scenarios_are_left_out_and_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENSTRIDE_DATA", str(tmp_path))
    load_recording.cache_clear()

    planned = suite.plan(suite.parse(["--only", "load-20110303,h2"]))

    assert [cast.path.stem for cast in planned.casts] == ["h2"]
    assert "EVENSTRIDE_DATA" in planned.missing[0]


@pytest.mark.parametrize(
    "wrong",
    [
        TINY.replace("steps: 4", "steps: -4"),
        TINY.replace("steps: 4", "stepps: 4"),
        TINY.replace("}]}", "}], events: [{kind: replay, at: 9, workers: all}]}"),
    ],
)
def test_a_scenario_with_a_mistake_is_refused_even_without_the_recording(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_folder(monkeypatch, tmp_path, tiny=TINY, wrong=wrong)
    monkeypatch.setenv("EVENSTRIDE_DATA", str(tmp_path))
    load_recording.cache_clear()

    with raises_message(ScenarioError, "wrong.yaml"):
        suite.plan(suite.parse([]))


def test_a_missing_scenario_is_refused_before_anything_runs() -> None:
    with raises_message(ScenarioError, "nowhere.yaml"):
        suite.plan(suite.parse(["--only", "nowhere"]))


@pytest.mark.parametrize(("at", "counts"), [(8, True), (9, False)])
def test_a_change_counts_if_it_leaves_time_to_follow_it(
    at: int, counts: bool, tmp_path: Path
) -> None:
    file = tmp_path / "late.yaml"
    event = f"events: [{{kind: step, at: {at}, workers: 0, speed: 0.5}}]"
    file.write_text(TINY.replace("steps: 4", f"steps: 30, {event}"))

    assert suite.perform(suite.Task(file, 2, 0, ("adaptive",))).changes is counts


@pytest.mark.parametrize(("efficiency", "code"), [(0.99, 0), (0.9, 1)])
def test_the_exit_code_tells_whether_adaptive_is_behind_or_an_aim_is_missed(
    efficiency: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def performed(tasks: list[suite.Task]) -> list[suite.Outcome]:
        rows = row("adaptive", 0, efficiency), row("uniform", 0, 0.9)
        return [suite.Outcome(task, rows, changes=True) for task in tasks]

    monkeypatch.setattr(suite, "perform_all", performed)

    assert suite.main(["--only", "reference", "--lags", "1", "--seeds", "1"]) == code


def test_every_scenario_runs_under_every_lag_and_seed_the_largest_first() -> None:
    asked = suite.parse(["--only", "h1,equal-64", "--seeds", "2", "--lags", "1,8"])

    tasks = suite.tasks_of(asked, suite.plan(asked).casts)

    assert [task.path.stem for task in tasks] == ["equal-64"] * 4 + ["h1"] * 4
    assert {(task.lag, task.seed) for task in tasks} == {(1, 0), (1, 1), (8, 0), (8, 1)}
