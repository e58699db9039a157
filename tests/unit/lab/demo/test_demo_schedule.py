"""The schedule and the report of a demo, and the sizes it chooses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from evenstride.errors import ConfigError
from evenstride.lab.comparison.comparison_result import best_split
from evenstride.lab.demo.demo_run import run_demo
from evenstride.lab.demo.demo_schedule import DemoSchedule, Report
from evenstride.lab.demo.demo_script import Demo, DemoTask, choose_batch, sizes_for
from tests.unit.lab.reports import EQUAL, FAST, SLOW, block, report, usual

rates = st.lists(st.floats(10.0, 1e5), min_size=1, max_size=6)


@pytest.mark.parametrize("data", [None, Path("/somewhere/fashion")])
def test_a_plan_survives_its_file(tmp_path: Path, data: Path | None) -> None:
    plan = DemoSchedule(tmp_path, data, rounds=3, block_steps=7, step_s=0.5, size_s=0.25)

    plan.save(tmp_path / "plan.json")

    assert DemoSchedule.load(tmp_path / "plan.json") == plan


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    whole = report(usual(), [block("uniform", [0.1], (1, 2), ids=[(0, [3, 1])])])

    whole.save(tmp_path / "report.json")
    read = Report.load(tmp_path / "report.json")

    assert read.ranks[0] == whole.ranks[0]
    assert read.ranks[1].before == SLOW, "sizes are numbers again"
    assert [(epoch, ids) for epoch, ids in read.ranks[1].blocks[0].ids] == [(0, [3, 1])]
    assert read.ranks[0].blocks[0].shares == EQUAL, "shares are a tuple again"
    assert (read.global_batch, read.train_samples, read.changes) == (6, 4, 2)


@given(rates, st.floats(0.01, 1.0), st.integers(200, 100_000))
def test_the_batch_takes_about_the_wanted_time_and_gives_everyone_some(
    rates: list[float], step_s: float, most: int
) -> None:
    batch = choose_batch(rates, step_s, most)

    wanted = step_s * sum(rates)
    assert batch == most or batch >= 12 * len(rates)
    assert batch <= most
    if 12 * len(rates) + 8 < wanted < most:
        assert abs(batch - wanted) <= 4
        assert batch % 8 == 0


def test_a_worker_is_calibrated_around_its_share_and_at_the_equal_one() -> None:
    assert sizes_for(300.0, [300.0, 100.0], 200) == [90, 100, 150]
    assert sizes_for(100.0, [300.0, 100.0], 200) == [30, 50, 100]
    assert sizes_for(1.0, [1e6, 1.0], 20) == [1, 2, 10]


@given(
    st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=6), st.integers(1, 5_000), st.integers(0, 5)
)
def test_all_workers_measure_as_often(rates: list[float], batch: int, which: int) -> None:
    rate = rates[which % len(rates)]

    sizes = sizes_for(rate, rates, batch)

    assert len(set(sizes)) == 3, "every one is a collective call"
    assert sizes == sorted(sizes)
    assert sizes[0] >= 1


def test_an_equal_worker_among_unequal_ones_measures_as_often() -> None:
    assert sizes_for(2.0, [3.0, 2.0, 1.0], 90) == [18, 30, 45]


def test_the_best_split_for_the_calibrated_curves_is_run_as_a_fixed_one() -> None:
    assert best_split([FAST, SLOW], 6) == (4, 2)


def test_the_second_fixed_split_is_the_one_at_which_adaptive_has_arrived() -> None:
    assert Demo.neighbour((70, 30), adaptive=(60, 40)) == (60, 40)


def test_when_both_agree_the_second_one_has_a_little_less_for_the_largest_share() -> None:
    assert Demo.neighbour((70, 30), adaptive=(70, 30)) == (68, 32)
    assert Demo.neighbour((5, 3), adaptive=(5, 3)) == (4, 4)
    assert Demo.neighbour((6, 6), adaptive=(6, 6)) == (5, 7)
    assert Demo.neighbour((6,), adaptive=(6,)) == (6,)


def test_a_task_in_whole_batches_has_no_shorter_step_in_an_epoch() -> None:
    data = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    task = DemoTask("numbers", data, data, nn.Identity)

    whole = task.in_whole_batches(4)

    assert whole.train.tensors[1].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert len(whole.test) == 10


def _refused(plan: DemoSchedule, speeds: tuple[float, ...], match: str) -> None:
    news: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenstride.lab.demo.demo_run.usable_cpus", lambda: 2)
        patch.setattr("evenstride.lab.demo.demo_run.run", lambda *_: pytest.fail("it was started"))
        with pytest.raises(ConfigError, match=match):
            run_demo(plan, speeds, news.append)
    assert news == []
    assert not plan.folder.exists()


def test_speeds_above_the_cores_are_refused_before_anything_is_done(tmp_path: Path) -> None:
    _refused(DemoSchedule(tmp_path / "out", None), (1.0, 1.0, 0.5), r"sum to 2\.5 cores")


def test_missing_digits_are_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)

    _refused(DemoSchedule(tmp_path / "out", None), (1.0,), "needs scikit-learn")


def test_a_folder_without_the_data_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    _refused(DemoSchedule(tmp_path / "out", tmp_path / "nowhere"), (1.0,), "nowhere.* is missing")
