"""The papers' experiments: cells, what is stored and continued, and the pages from the results."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from benchmarks.papers import (
    cells,
    changing_speeds,
    experiment,
    iteration_times,
    oscillation,
    page,
    paper_ranks,
    throughput,
    to_accuracy,
)
from benchmarks.papers.cells import CellStore, PaperCell, PaperCluster, cell_of, groups, in_turns
from benchmarks.papers.comparing import compared, paired, speedups, table
from benchmarks.papers.experiment import CellConductor, CellPlan, PaperFigure
from torch._C._distributed_c10d import HashStore

from evenstride.core.policies import policy_from_spec
from evenstride.errors import LaunchError
from evenstride.lab.processes.local_launch import LaunchProgress
from evenstride.lab.processes.speeds import check_fit, place
from evenstride.runtime.engines.process_groups import take_down_group
from evenstride.trace.read import LineTail

CELL = PaperCell("cnn", "H6", "uniform")


def record(cell: PaperCell = CELL, **changed: Any) -> dict[str, Any]:
    """Return a result of a cell."""
    plain = {"time_s": 10.0, "steps_ms": [100] * 8, "shares": [4, 8], "drift": 0.01}
    return {**asdict(cell), "date": "2026-11-27", **plain, **changed}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for results, which all figures use."""
    monkeypatch.setattr(experiment, "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the recorded load by random numbers."""
    used = np.random.default_rng(0).integers(0, 101, (50, 288)).astype(float)
    monkeypatch.setattr(changing_speeds, "load_recording", lambda _: used)


def phases(cluster: PaperCluster) -> Iterator[tuple[float, ...]]:
    yield cluster.speeds
    for _, speeds in cluster.changes:
        yield speeds


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("figure", page.FIGURES, ids=lambda figure: figure.name)
def test_every_cell_can_run_on_two_cores(figure: PaperFigure) -> None:
    clusters = figure.clusters()

    assert len(set(figure.cells)) == len(figure.cells)
    for cell in figure.cells:
        assert cell.job in cells.JOBS
        if cell.policy not in (cells.FIXED, cells.CURVE):
            policy_from_spec(cell.policy)
        for speeds in phases(clusters[cell.cluster]):
            check_fit(speeds, 2)
            assert place(speeds, 2) is not None, cell


def test_all_policies_of_a_seed_run_one_after_the_other() -> None:
    sizes = [len(group) for group in groups(to_accuracy.FIGURE.cells)]

    assert max(sizes) == len(to_accuracy.POLICIES)
    assert sum(sizes) == len(to_accuracy.FIGURE.cells)
    assert all(
        len(group) == 1 for group in groups(to_accuracy.FIGURE.cells) if group[0].sync == "asp"
    )


def test_the_order_of_the_policies_changes_with_the_seed() -> None:
    orders = [in_turns(seed, "abcd") for seed in range(3)]

    assert orders == [list("abcd"), list("adcb"), list("cdab")]


def test_speeds_have_the_papers_ratios_and_one_total() -> None:
    assert cells.of_cores(4, 11, 24) == pytest.approx([1.5 * n / 39 for n in (4, 11, 24)])


def test_the_mean_speed_counts_the_steps_of_each_phase() -> None:
    cluster = PaperCluster((1.0, 0.2), ((10, (0.4, 0.2)),), 40)

    assert cluster.mean_speeds() == pytest.approx((0.55, 0.2))
    assert PaperCluster((1.0, 0.2)).mean_speeds() == (1.0, 0.2)


def test_the_last_level_of_omnilearns_schedule_is_twice_as_long() -> None:
    schedule = changing_speeds.schedule()

    assert schedule.steps == 45 * cells.JOBS["short-cnn"].epoch_steps
    assert schedule.changes[-1][0] == 35 * cells.JOBS["short-cnn"].epoch_steps
    assert max(map(max, phases(schedule))) == pytest.approx(1.0)


def test_a_slowdown_takes_five_to_ten_seconds_of_twenty() -> None:
    cluster = changing_speeds.disturbance()
    full = cluster.speeds
    slowed = [
        now / was for speeds in phases(cluster) for now, was in zip(speeds, full, strict=True)
    ]

    assert min(slowed) < 1.0
    assert all(factor == pytest.approx(1.0) or 20 / 30 <= factor <= 20 / 25 for factor in slowed)


def test_a_disturbed_result_is_kept_and_its_cell_is_missing(tmp_path: Path) -> None:
    store = CellStore(tmp_path / "figure.jsonl")
    other = PaperCell("cnn", "H6", "adaptive")
    store.add(record(drift=0.3))
    store.add(record(drift=0.2, time_s=7.0))
    store.add(record(other))

    assert store.missing([CELL, other]) == [CELL]
    assert store.best()[CELL]["time_s"] == 7.0, "the least disturbed one"
    store.add(record(time_s=9.0))
    store.add(record(time_s=8.0))
    assert store.missing([CELL, other]) == []
    assert store.best()[CELL]["time_s"] == 9.0
    assert len(store.records()) == 5
    assert cell_of(store.records()[2]) == other


def test_the_results_of_one_group_are_compared() -> None:
    equal, fixed, ours, dbs = (
        PaperCell("cnn", "H6", name) for name in ("uniform", "fixed", "adaptive", "dbs")
    )
    first = [record(cell, achieved=[0.1, 0.9]) for cell in (equal, fixed, ours)]
    second = [record(cell, achieved=[0.2, 0.8], time_s=5.0) for cell in (equal, dbs)]
    third = [record(cell, achieved=[0.3, 0.7], time_s=1.0, drift=0.2) for cell in (equal, ours)]

    rows = {row.policy: row for row in compared([*third, *second, *first])}

    assert (rows["adaptive"].time_s, rows["adaptive"].speedup) == (10.0, 1.0)
    assert (rows["adaptive"].mark, rows["adaptive"].efficiency_mark) == ("", "")
    assert (rows["dbs"].speedup, rows["dbs"].mark) == (1.0, "")
    assert rows["dbs"].efficiency == pytest.approx(2.0)
    assert rows["dbs"].efficiency_mark == "†"
    alone = {row.policy: row for row in compared([*first[:2], third[1]])}["adaptive"]
    assert alone.speedup == pytest.approx(10.0)
    assert alone.mark == "*†"
    strange = record(ours, achieved=[0.4, 0.6], time_s=2.0)
    disturbed = {row.policy: row for row in compared([strange, *third])}["adaptive"]
    assert (disturbed.time_s, disturbed.mark) == (1.0, "*"), "a whole group comes first"


def test_of_several_groups_the_least_disturbed_one_counts() -> None:
    policies = [PaperCell("cnn", "H6", name) for name in ("uniform", "fixed", "adaptive")]
    found = [
        record(cell, achieved=[number / 10], time_s=time_s, drift=drift)
        for number, drifts in enumerate([(0.0, 0.0, 0.15), (0.12, 0.0, 0.0), (0.3, 0.3, 0.0)])
        for cell, time_s, drift in zip(policies, (20, 8, 10 + number), drifts, strict=True)
    ]

    assert compared(found)[-1].time_s == 11.0
    assert compared(found)[-1].mark == "*"


def test_a_result_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "figure.jsonl"
    store = CellStore(path)
    store.add(record())
    whole = path.read_text()
    path.write_text(whole + whole[:30])

    assert store.missing([CELL, PaperCell("cnn", "H6", "dbs")]) == [PaperCell("cnn", "H6", "dbs")]
    store.add(record(PaperCell("cnn", "H6", "dbs")))
    assert len(store.records()) == 2


class FakeLimits:
    """Limits that only note what they are set to."""

    kind = "none"

    def __init__(self) -> None:
        self.speeds = dict[int, float]()

    def join(self, worker: int, pid: int) -> None: ...

    def leave(self, pid: int) -> None: ...

    def set_speed(self, worker: int, speed: float) -> None:
        self.speeds[worker] = speed

    def close(self) -> None: ...


def test_the_result_of_a_cell_is_stored_when_the_ranks_report_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    news, limits = tmp_path / "news.jsonl", FakeLimits()
    found = {name: value for name, value in record(drift=0.2).items() if name not in asdict(CELL)}
    store, gone = CellStore(tmp_path / "figure.jsonl"), [2**22 + 1, 2**22 + 2]
    records = (
        {"what": "pids", "pids": gone},
        {"what": "speeds", "speeds": [0.5, 0.25]},
        {"what": "cell", "cell": asdict(CELL), "found": found},
    )
    news.write_text("".join(json.dumps(one) + "\n" for one in records))
    plan = CellPlan([CELL], PaperCluster((0.5, 0.5)), 0.0)

    CellConductor(plan, limits, LineTail(news), store, []).look(LaunchProgress(0, 0.0))

    assert limits.speeds == {0: 0.5, 1: 0.25}
    assert store.missing([CELL]) == [CELL]
    assert store.records()[0]["time_s"] == 10.0
    assert "drift 20.0%, disturbed" in capsys.readouterr().err


@pytest.fixture
def lone_group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield
    take_down_group()


@pytest.mark.usefixtures("lone_group")
def test_a_rank_trains_cells_to_the_target_and_repeats_a_disturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper_ranks, "SIZE_S", 0.0)
    monkeypatch.setattr(paper_ranks, "PROBE_S", 0.0)
    monkeypatch.setattr(paper_ranks, "BLOCK_S", 1e-9)
    drifts = iter([0.5, 0.5, 0.0, 0.0, 0.5, 0.5])  # of each training, read twice
    monkeypatch.setattr(paper_ranks, "drift", lambda *_: next(drifts))
    dice = np.random.default_rng(0)
    x = dice.normal(size=(640, 4)).astype(np.float32)
    y = x @ np.array([[1.0], [2.0], [0.0], [-1.0]], dtype=np.float32)
    np.savez(tmp_path / experiment.DATA, x=x, y=y, test_x=x[:64], test_y=y[:64])
    every = [PaperCell("linear", "one", policy) for policy in ("uniform", cells.FIXED)]
    plan = CellPlan(every, PaperCluster((1.0,)), time.time() + 100)

    paper_ranks.PaperRun(plan, tmp_path).run()

    news = [json.loads(line) for line in (tmp_path / experiment.NEWS).read_text().splitlines()]
    done = [(one["cell"]["policy"], one["found"]["drift"]) for one in news if one["what"] == "cell"]
    assert done == [("uniform", 0.5), (cells.FIXED, 0.0), ("uniform", 0.5)]
    for one in news[1:]:
        found = one["found"]
        assert len(found["steps_ms"]) == 3 * found["epochs"] == 3 * len(found["scores"])
        assert found["scores"][-1] < 0.9 * found["scores"][0]
        assert found["shares"] == [312]


def figure_of(*policies: str, compares: bool = False) -> PaperFigure:
    every = tuple(PaperCell("cnn", place, name) for place in ("H6", "H10") for name in policies)
    return PaperFigure(
        "tried", "About.", lambda: to_accuracy.CLUSTERS, every, table, print, compares
    )


def test_a_run_trains_only_what_is_missing(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure, trained = figure_of("uniform", "adaptive"), list[list[PaperCell]]()

    def train(plan: CellPlan, store: CellStore) -> None:
        trained.append(plan.cells)
        if plan.cells[0].cluster == "H10" and len(trained) == 2:
            raise LaunchError("a worker was lost")
        for cell in plan.cells:
            store.add(record(cell, drift=0.5 if len(trained) == 1 and cell == plan.cells[0] else 0))

    monkeypatch.setattr(experiment, "train", train)

    assert figure.main([]) == experiment.MISSING
    assert trained == [list(figure.cells[:2]), list(figure.cells[2:])]
    assert figure.main([]) == 0
    assert trained[2:] == [[figure.cells[0]], list(figure.cells[2:])]
    assert figure.main([]) == 0
    assert len(trained) == 4


def test_a_group_includes_the_splits_that_its_results_are_compared_with(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies, trained = ("uniform", "adaptive", "fixed", "dbs"), list[list[str]]()
    figure = figure_of(*policies, compares=True)
    monkeypatch.setattr(
        experiment, "train", lambda plan, _: trained.append([cell.policy for cell in plan.cells])
    )
    store = CellStore(results / "tried.jsonl")
    for cell in figure.cells:
        store.add(record(cell, drift=0.5 if (cell.cluster, cell.policy) == ("H6", "dbs") else 0.0))

    figure.main([])
    figure_of(*policies).main([])
    store.add(record(figure.cells[3]))
    store.add(record(PaperCell("cnn", "H10", "uniform", 1)))
    figure.main([])

    assert trained == [["uniform", "fixed", "dbs"], ["dbs"]], "the second figure compares nothing"


def test_no_group_begins_after_the_minutes(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "train", lambda *_: pytest.fail("a group began"))

    assert figure_of("uniform").main(["--minutes", "0"]) == experiment.MISSING


def test_only_takes_cells_with_all_words(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = figure_of("uniform", "adaptive")

    assert figure.main(["--list", "--only", "H10,adaptive,0"]) == 0
    assert capsys.readouterr().out == "missing cnn H10 adaptive 0 bsp\n"
    assert figure.main(["--only", "H10,dbs"]) == 2
    assert "no cell has all of H10,dbs" in capsys.readouterr().out


def test_efficiency_is_against_the_fastest_fixed_split_of_the_same_seed() -> None:
    times = {("uniform", 0): 20.0, ("fixed", 0): 8.0, ("adaptive", 0): 10.0}
    times |= {("uniform", 1): 18.0, ("fixed", 1): 9.0, ("adaptive", 1): 9.0, ("adaptive", 2): 1.0}
    rows = compared(
        record(PaperCell("cnn", "H6", policy, seed), time_s=time_s)
        for (policy, seed), time_s in times.items()
    )

    ours = next(row for row in rows if row.policy == "adaptive")
    assert ours.seeds == 2  # without the seed in which no equal split ran
    assert ours.speedup == pytest.approx(2.0)
    assert ours.least_efficiency == pytest.approx(0.8)
    assert ours.efficiency == pytest.approx(0.8**0.5)


def test_a_figure_of_a_disturbed_result_is_marked() -> None:
    policies = [PaperCell("cnn", "H6", name) for name in ("uniform", "adaptive", "dbs")]
    equal, ours, dbs = (record(cell) for cell in policies)
    some = [equal, {**ours, "drift": 0.3}, dbs]

    marks = [
        [row.mark for row in compared(found)]
        for found in (some, [{**equal, "drift": 0.3}, ours, dbs])
    ]

    assert marks == [["", "*", ""], ["*", "*", "*"]]
    assert speedups(some, ["adaptive", "dbs"], "cnn", "H6", "bsp") == (
        "`adaptive` 1.00x*, `dbs` 1.00x"
    )


def test_there_is_no_efficiency_without_the_calibrated_split() -> None:
    policies = ("uniform", "static:cores", "adaptive")
    found = [record(PaperCell("cnn", "H6", name)) for name in policies]

    assert [row.efficiency for row in compared(found)] == [None] * 3
    assert table(found).rows[-1][5:8] == ("-", "-", "-")
    some = [record(PaperCell("cnn", "H6", name, 1)) for name in (*policies, "fixed")]
    ours = next(row for row in compared([*found, *some]) if row.policy == "adaptive")
    assert ours.seeds == 2
    assert ours.efficiency == pytest.approx(1.0)


def test_an_efficiency_is_marked_if_the_fastest_fixed_split_was_disturbed() -> None:
    policies = [PaperCell("cnn", "H6", name) for name in ("uniform", "fixed", "adaptive")]
    equal, fixed, ours = (
        record(cell, time_s=time_s) for cell, time_s in zip(policies, (20.0, 8.0, 9.0), strict=True)
    )

    row = compared([equal, {**fixed, "drift": 0.3}, ours])[-1]
    other = compared([{**equal, "drift": 0.3}, fixed, ours])[-1]

    assert (row.mark, row.efficiency_mark) == ("", "*")
    assert (other.mark, other.efficiency_mark) == ("*", "")


def test_a_figure_that_compares_results_of_different_days_is_marked() -> None:
    equal = record(PaperCell("cnn", "H6", "uniform"), date="2026-11-26")
    fixed, ours = (record(PaperCell("cnn", "H6", name)) for name in ("fixed", "adaptive"))

    rows = {row.policy: row for row in compared([equal, fixed, ours])}

    assert (rows["adaptive"].mark, rows["adaptive"].efficiency_mark) == ("†", "")
    assert (rows["uniform"].mark, rows["uniform"].efficiency_mark) == ("", "†")


def test_a_step_is_compared_with_that_of_the_equal_split_at_h1_by_seed() -> None:
    text = page.times_of("cnn", "adaptive", "H6")
    even = [record(PaperCell("cnn", "H1", "uniform", seed)) for seed in (0, 1)]
    ours = [record(PaperCell("cnn", "H6", "adaptive", seed), time_s=15.0) for seed in (0, 2)]

    def said(*records: dict[str, Any]) -> str | None:
        found: str | None = text({"to_accuracy": [*even, *records]})
        return found

    assert said() is None
    assert said(*ours) == "a CNN: `adaptive` at H6 1.50 times the equal split at H1"
    assert "1.50* times" in str(said({**ours[0], "drift": 0.3}))
    assert "1.50† times" in str(said({**ours[0], "date": "2026-11-28"}))
    assert "1.50† times" in str(said({**ours[0], "achieved": [0.1, 0.4]}))


def test_pairs_of_one_group_and_of_one_day_come_first() -> None:
    one, other = ("uniform", "H6"), ("adaptive", "H6")
    equal = PaperCell("cnn", "H6", "uniform")
    ours = PaperCell("cnn", "H6", "adaptive")
    found = [
        record(equal, date="2026-11-26", time_s=1.0),
        record(equal, achieved=[0.5], time_s=2.0),
        record(equal, time_s=3.0, drift=0.2),
        record(ours, time_s=4.0),
    ]

    assert [a["time_s"] for a, _ in paired(found, "cnn", one, other)] == [3.0]
    assert [a["time_s"] for a, _ in paired([*found[:2], found[3]], "cnn", one, other)] == [2.0]


def test_a_controller_is_compared_with_its_open_loop_in_the_seeds_of_both() -> None:
    text = page.dynamic_over_static("cnn")
    every = [
        record(PaperCell("cnn", "P100+Xeon", policy, seed), time_s=time_s)
        for policy, seed, time_s in (
            ("static:cores", 0, 10.0),
            ("static:cores", 1, 40.0),
            ("dynamic-batching", 0, 8.0),
        )
    ]

    assert text({"to_accuracy": every[:2]}) is None
    assert text({"to_accuracy": every}) == (
        "a CNN at this ratio: 20.0% less time than static shares"
    )


def test_the_second_half_leaves_out_the_opening() -> None:
    slow = {"time_s": 1.2, "steps_ms": [500, 500, 100, 100]}
    even: dict[str, Any] = {"time_s": 0.8, "steps_ms": [200] * 4}
    found = [
        record(**even),
        record(PaperCell("cnn", "H6", "fixed"), **even),
        record(PaperCell("cnn", "H6", "adaptive"), **slow),
    ]
    ours = compared(found)[-1]

    assert (ours.efficiency, ours.late_efficiency) == pytest.approx((2 / 3, 2.0))


def test_a_target_that_rounding_moves_by_an_epoch_changes_no_speedup() -> None:
    steps = {"uniform": 4, "adaptive": 6, "lb-bsp-cpu": 2, "dbs": 6}
    rows = {
        row.policy: row
        for row in compared(
            record(
                PaperCell("resnet", "H6", policy), steps_ms=[1000] + [500] * (n - 1), time_s=n / 2
            )
            for policy, n in steps.items()
        )
    }

    assert rows["adaptive"].time_s == 3.0
    # Six steps take 3.0 s, of which the first four take five sevenths.
    assert rows["adaptive"].speedup == pytest.approx(2.0 / (3.0 * 5 / 7))
    assert rows["lb-bsp-cpu"].speedup == pytest.approx(2.0 * (3 / 5) / 1.0)
    assert rows["dbs"].speedup == pytest.approx(2.0 / 3.0), "its steps have other samples"


def test_changes_are_counted_until_the_slowest_worker_is_near_its_share() -> None:
    splits = [[0, [30, 30]], [12, [20, 40]], [13, [11, 49]], [20, [10, 50]], [21, [11, 49]]]
    found = record(splits=splits, busy_ms=[[100] * 90] * 2)

    assert oscillation.held(found)[12:14] == [[20, 40], [11, 49]]
    assert oscillation.adjustments(found) == (2, 2)


def test_throughput_falls_beyond_its_highest_point() -> None:
    curve = {"1": 0.01, "64": 0.1, "1024": 2.0}
    found = [record(PaperCell("cnn", "alone", "curve"), curves=[curve] * 3)]

    assert throughput.rows(found).rows[0][-1] == "20% from 64 on"
    assert page.falling({"throughput": found}) == "a CNN, largest fall up to 1,024 samples: 20%"


def empty() -> page.Results:
    return {figure.name: [] for figure in page.FIGURES}


def filled() -> page.Results:
    """Return a result for every cell, faster for every later policy."""
    found = empty()
    for figure in page.FIGURES:
        for number, cell in enumerate(figure.cells):
            busy = {"busy_ms": [[100] * 90] * 3, "splits": [[0, [4, 8, 9]], [12, [3, 9, 9]]]}
            curves = {"curves": [{"1": 0.01, "512": 0.5}] * 3}
            found[figure.name].append(record(cell, time_s=20.0 - number / 100, **busy, **curves))
    return found


def test_every_generated_claim_is_a_row_of_the_page_and_changes_only_its_column() -> None:
    before = page.CLAIMS.read_text()
    after = page.claims_page(before, filled())
    rows = {name: (a, b) for (name, a), (_, b) in zip(rows_of(before), rows_of(after), strict=True)}

    assert page.claims_page(before, empty()) == before
    assert page.claims_page(after, filled()) == after
    assert set(page.claims()) <= set(rows)
    for name, (was, now) in rows.items():
        assert (was != now) <= (name in page.claims()), name
        assert was[:5] + was[6:] == now[:5] + now[6:], name
        if name in page.claims():
            assert now[5].endswith("([papers](papers.md))"), name


def rows_of(text: str) -> list[tuple[str, list[str]]]:
    """Return the number and the other cells of each row."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in line] for line in lines if len(line) == 8]
    return [(line[0], line[1:]) for line in found if line[0][-1:].isdecimal()]


def test_the_page_has_a_line_for_each_place_with_a_result() -> None:
    some = {**empty(), "to_accuracy": filled()["to_accuracy"]}
    text = page.papers_page(some)

    assert "| linear, H10, bsp | 3 |" in text
    assert "No cell of 12 has a result yet." in text


def test_the_page_says_which_policies_have_fewer_seeds() -> None:
    cells = [PaperCell("cnn", "H6", name, seed) for name, seed in (("uniform", 0), ("uniform", 1))]
    found = [record(cell) for cell in (*cells, PaperCell("cnn", "H6", "adaptive", 1))]

    rows = page.by_place(found).rows

    assert rows[0][1] == "2"
    assert "1.00x, - (1 of 2 seeds)" in rows[0]


def test_a_figure_is_drawn_from_its_results() -> None:
    everything = filled()

    for figure in page.FIGURES:
        assert figure.draw(everything[figure.name][:12]).axes, figure.name


def test_iteration_times_leave_out_the_first_steps() -> None:
    assert iteration_times.spread([9000] * 10 + [100] * 20) == (100, 100, 100)


def test_the_pages_are_up_to_date_with_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main(["--check"]) == 0, capsys.readouterr().out


def test_a_page_that_is_not_up_to_date_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "papers.md"
    stale.write_text("old")
    monkeypatch.setattr(page, "PAGE", stale)

    assert page.main(["--check"]) == 1
    assert "papers.md is not up to date" in capsys.readouterr().out


def test_speedups_are_none_without_results() -> None:
    assert speedups([], ["adaptive"], "cnn", "H6", "bsp") is None
    assert speedups([record()], ["uniform"], "cnn", "H6", "bsp") == "`uniform` 1.00x"
