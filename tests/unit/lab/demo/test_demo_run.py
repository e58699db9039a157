"""A demo whose launch ends at once, and its arms on real ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from evenstride.errors import LaunchError
from evenstride.lab.comparison.comparison_result import Comparison
from evenstride.lab.demo.demo_run import run_demo
from evenstride.lab.demo.demo_schedule import EQUAL_TRACE, NEWS, REPORT, TRACE, DemoSchedule
from evenstride.lab.demo.demo_script import Bench, DemoArm, DemoTask, small_net
from evenstride.lab.demo.fashion_mnist import FASHION_FILES
from evenstride.lab.processes.cpu_limits import Limits
from evenstride.lab.processes.local_launch import Launch, LaunchProgress
from evenstride.testing import RankPool
from tests.messages import raises_message
from tests.unit.lab.fake_runs import SpyLimits
from tests.unit.lab.reports import report, usual
from tests.unit.lab.traces import write_run

Watch = Callable[[LaunchProgress], None]
News = list[dict[str, Any]]


def _run(
    plan: DemoSchedule, limits: SpyLimits, *, fails: bool = False, traced: bool = False
) -> tuple[Comparison, News, Launch, list[int]]:
    news, drawn, launches = list[dict[str, Any]](), list[int](), list[Launch]()

    def launch(asked: Launch, used: Limits, folder: Path, watch: Watch) -> float:
        assert used is limits
        launches.append(asked)
        with (folder / NEWS).open("w") as file:
            for number in range(2):
                file.write(json.dumps({"what": "block", "number": number}) + "\n")
                file.flush()
                watch(LaunchProgress(number, 0.1))
            file.write(json.dumps({"what": "the last"}) + "\n")
        if fails:
            raise LaunchError("a worker fell over")
        if traced:
            for name in (EQUAL_TRACE, TRACE):
                write_run(folder / name, name.removesuffix(".jsonl"), [0.1] * 50, [(4, 2)])
        first, second = usual(0), usual(1)
        for some in (*first, *second):
            some.ids.append((0, []))
        report(first, second).save(folder / REPORT)
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenstride.lab.demo.demo_run.run", launch)
        patch.setattr("evenstride.lab.demo.demo_run.usable_cpus", lambda: 2)
        patch.setattr(
            "evenstride.lab.demo.demo_run.open_limits", lambda _: (limits, "Only numbers.")
        )
        outcome = run_demo(plan, (1.0, 0.5), news.append, lambda: drawn.append(len(news)))
    return outcome, news, launches[0], drawn


def test_the_demo_passes_on_the_news_of_its_workers_while_they_train(tmp_path: Path) -> None:
    outcome, news, _, drawn = _run(DemoSchedule(tmp_path / "out", None), SpyLimits())

    assert news[0] == {"what": "limits", "kind": "numbers", "caveat": "Only numbers."}
    assert [item.get("number", item["what"]) for item in news[1:]] == [0, 1, "the last"]
    assert drawn == [2, 3, 4]
    assert (outcome.limits, outcome.caveats) == ("numbers", ("Only numbers.",))
    assert outcome.trace == str(tmp_path / "out" / "adaptive.jsonl")


def test_the_demo_writes_a_page_that_compares_both_runs(tmp_path: Path) -> None:
    outcome, *_ = _run(DemoSchedule(tmp_path / "out", None), SpyLimits(), traced=True)

    assert outcome.report == str(tmp_path / "out" / "report.html")
    page = Path(outcome.report).read_text()
    assert "equal" in page
    assert "balanced" in page


def test_without_traces_no_page_is_written(tmp_path: Path) -> None:
    outcome, *_ = _run(DemoSchedule(tmp_path / "out", None), SpyLimits())

    assert outcome.report is None
    assert not (tmp_path / "out" / "report.html").exists()


def test_the_demo_hands_its_workers_the_plan_and_shields_them_from_the_callers_settings(
    tmp_path: Path,
) -> None:
    for name in itertools.chain(*FASHION_FILES.values()):
        (tmp_path / name).touch()
    plan = DemoSchedule(tmp_path / "out", tmp_path, step_s=0.5)

    _, _, launch, _ = _run(plan, SpyLimits())

    script, planned = launch.command
    assert Path(script).name == "demo_script.py"
    assert DemoSchedule.load(Path(planned)) == plan
    assert launch.speeds == (1.0, 0.5)
    names = ("EVENSTRIDE_TRACE", "EVENSTRIDE_POLICY", "EVENSTRIDE_MAX_STEPS")
    assert launch.environment == dict.fromkeys(names, "")


def test_the_demos_limits_are_taken_away_after_a_good_end_and_after_a_bad_one(
    tmp_path: Path,
) -> None:
    good, bad = SpyLimits(), SpyLimits()

    _run(DemoSchedule(tmp_path / "good", None), good)
    with raises_message(LaunchError):
        _run(DemoSchedule(tmp_path / "bad", None), bad, fails=True)

    assert (good.closed, bad.closed) == (1, 1)


def _task() -> DemoTask:
    images = torch.arange(12.0).reshape(12, 1, 1, 1).expand(12, 1, 4, 4) / 12
    data = TensorDataset(torch.arange(12), images, torch.arange(12) % 10)
    test = TensorDataset(*(t[:5] for t in data.tensors))
    return DemoTask("numbers", data, test, partial(small_net, 1))


def _train(rank: int, folder: str) -> dict[str, Any]:
    trace = Path(folder, "trace.jsonl")
    arm = DemoArm("static:3,1", _task(), 4, trace)
    first, second = arm.run(5), arm.run(1)
    accuracy = arm.accuracy()
    arm.stride.close()
    return {
        "ids": [*first.ids, *second.ids],
        "counts": first.counts,
        "losses": len(first.losses),
        "times": (len(first.step_s), min(first.step_s) > 0, len(second.step_s)),
        "shares_timed": [share for share, _ in first.work],
        "busy": all(
            0 < busy_s <= step_s
            for (_, busy_s), step_s in zip(first.work, first.step_s, strict=True)
        ),
        "shares": (first.shares, first.policy),
        "accuracy": accuracy,
        "training": arm.net.training,
        "traced": trace.is_file(),
    }


def test_an_arm_trains_blocks_across_epochs_and_counts_what_it_was_given(
    ranks: RankPool, tmp_path: Path
) -> None:
    first, second = ranks.run(_train, 2, str(tmp_path))

    for mine, count in ((first, 3), (second, 1)):
        assert mine["counts"] == [count] * 5
        assert mine["losses"] == 5
        # The first step after the barrier and after each start of an epoch has no time.
        assert mine["times"] == (3, True, 0)
        assert mine["shares"] == ((3, 1), "static:3,1")
        assert mine["shares_timed"] == [count] * 3
        assert mine["busy"], "a worker's own work is a part of the step"
        assert mine["training"] is True
    assert first["accuracy"] == second["accuracy"]
    for epoch in (0, 1):
        ids = [
            n for mine in (first, second) for of, some in mine["ids"] if of == epoch for n in some
        ]
        assert sorted(ids) == list(range(12))
    assert first["traced"]


def _measure(rank: int) -> tuple[list[int], bool, float]:
    bench = Bench(_task())
    curve = bench.curve((1, 8), 0.0)
    return list(curve), min(curve.values()) > 0, bench.communication_s(3)


def test_a_bench_measures_each_size_and_the_communication(ranks: RankPool) -> None:
    for sizes, positive, communication_s in ranks.run(_measure, 2):
        assert sizes == [1, 8]
        assert positive
        assert communication_s > 0
