"""What the GPU benchmark plans, computes from what ranks found, and prints; without any rank."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import gpu, gpu_ranks
from benchmarks.gpu_training import Net, between_s
from hypothesis import given
from hypothesis import strategies as st

WORKERS = (1000.0, 300.0, 100.0)  # samples per second, without a fixed time


@pytest.mark.parametrize(
    ("cores", "sizes"),
    [(1, [1, 1, 1]), (2, [1, 1, 1]), (4, [1, 2, 1]), (8, [1, 3, 2, 1]), (16, [2, 6, 4, 2])],
)
def test_the_cores_go_to_the_gpu_worker_and_unequally_to_the_others(
    cores: int, sizes: list[int]
) -> None:
    assert [len(mine) for mine in gpu.cluster_cores(range(cores))] == sizes


@given(st.integers(1, 200), st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_every_worker_has_cores_and_shares_none_where_there_are_enough(
    cores: int, weights: list[int]
) -> None:
    split = gpu.dealt(range(100, 100 + cores), weights)

    given_out = [core for mine in split for core in mine]
    assert all(split)
    assert len(split) == len(weights)
    assert set(given_out) <= set(range(100, 100 + cores))
    if cores >= len(weights):
        assert sorted(given_out) == list(range(100, 100 + cores))


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_a_part_s_launches_put_workers_on_the_device_and_name_work_that_is_there(
    device: str, quick: bool
) -> None:
    made = {
        name: (part, job)
        for part in gpu.PARTS
        for name, job in gpu.launches(part, device, range(16), quick=quick).items()
    }

    assert list(made) == [
        "cluster cnn",
        "cluster resnet",
        "timing",
        "budget one",
        "budget two",
        "sharing",
    ]
    for name, (part, job) in made.items():
        assert callable(getattr(gpu_ranks, part))
        assert len(job.devices) == len(job.cores)
        others = "cpu" if part in ("cluster", "timing") else device
        assert job.devices == (device, *[others] * (len(job.cores) - 1))
        assert name.split()[0] == part
    assert len(made["cluster cnn"][1].devices) == 4
    assert len(made["budget one"][1].devices) == 1
    assert sum(job.seconds + 15 for _, job in made.values()) < gpu.LIMIT_S < 540


def test_the_batch_makes_a_balanced_step_unless_the_slowest_would_hold_up_the_equal_one() -> None:
    assert gpu_ranks.batch_for([1000.0, 500.0], 0.1, 1.0) == 150
    assert gpu_ranks.batch_for([1e5, 100.0], 0.1, 0.5) == 2 * 50
    assert gpu_ranks.batch_for([1.0, 1.0, 1.0], 0.1, 1.0) == 3 * 8


def test_each_worker_is_calibrated_at_as_many_sizes_around_its_share_and_at_the_equal_one() -> None:
    assert gpu_ranks.calibration_sizes(300.0, WORKERS, 140) == [18, 30, 47]
    assert gpu_ranks.calibration_sizes(1.0, [1e6, 1.0], 60) == [1, 1, 30]


@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=8), st.data())
def test_fixed_splits_are_whole_splits_of_the_batch_beginning_with_the_best(
    best: list[int], data: st.DataObject
) -> None:
    adaptive = data.draw(st.permutations(best))

    splits = gpu_ranks.fixed_splits(tuple(best), tuple(adaptive))

    assert splits[0] == tuple(best)
    assert tuple(adaptive) in splits
    assert len(set(splits)) == len(splits)
    assert all(sum(split) == sum(best) and min(split) > 0 for split in splits)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12))
def test_what_spans_cover_counts_once(starts: list[tuple[int, int]]) -> None:
    inside = {t for start, length in starts for t in range(start, start + length)}

    assert gpu_ranks.covered([(a, a + length) for a, length in starts]) == len(inside)


@pytest.mark.parametrize(
    ("name", "on_card", "annotation", "counts"),
    [
        ("void cutlass::Kernel", True, False, True),
        ("Memcpy DtoH (Device -> Pinned)", True, False, False),
        ("Memset (Device)", True, False, False),
        ("DistributedDataParallel.forward", True, True, False),
        ("cudaLaunchKernel", False, False, False),
    ],
)
def test_only_kernels_count_as_computing_on_a_card(
    name: str, on_card: bool, annotation: bool, counts: bool
) -> None:
    kind = "DeviceType.CUDA" if on_card else "DeviceType.CPU"
    event = SimpleNamespace(name=name, device_type=kind, is_user_annotation=annotation)

    assert gpu_ranks._computes(event, cuda=True) is counts


def test_marks_of_a_stream_are_told_in_seconds_as_those_of_the_clock() -> None:
    first = SimpleNamespace(elapsed_time=lambda second: second.at - 1.0)

    assert between_s(first, SimpleNamespace(at=26.0)) == pytest.approx(0.025)
    assert between_s(1.5, 1.75) == 0.25


def cluster(**changed: Any) -> gpu.Found:
    """Return what workers without fixed times find: 140 samples, equal 466.7 ms, best 100 ms."""
    curves = [[(size, size / speed) for size in (10, 30, 47)] for speed in WORKERS]
    found = {
        "devices": ["card", "cpu", "cpu"],
        "backend": "gloo",
        "global_batch": 140,
        "before": curves,
        "after": curves,
        "communication_s": 0.0,
        "blocks": {
            "uniform": [0.4, 0.42, 0.48],
            "adaptive": [0.1, 0.105, 0.12],
            "static:100,30,10": [0.11, 0.1, 0.1],
            "static:90,35,15": [0.15, 0.15, 0.01],
        },
        "shares": (100, 30, 10),
        "changes": 3,
    }
    return {**found, **changed}


def test_a_cluster_is_judged_by_its_pairs_its_curves_and_the_fastest_fixed_split() -> None:
    figures = gpu.cluster_figures(cluster())

    assert figures["arms"]["uniform"]["step_s"] == 0.42
    assert figures["arms"]["uniform"]["quartiles_s"] == pytest.approx((0.41, 0.45))
    assert figures["speedup"]["ratio"] == pytest.approx(4.0)
    # The slowest worker's 46 or 47 of 140 samples, over the 100 ms that all take balanced.
    assert figures["bound"] == pytest.approx(4.65, abs=0.06)
    assert figures["of_bound"] == pytest.approx(4.0 / figures["bound"])
    assert figures["oracle"] == "static:100,30,10"
    assert figures["efficiency"]["ratio"] == pytest.approx(0.1 / 0.105)
    assert figures["speeds"] == pytest.approx((1.0, 0.3, 0.1))
    assert figures["alone_s_model"] == pytest.approx(0.14)
    assert not figures["disturbed"]


def test_a_cluster_that_changed_meanwhile_is_disturbed() -> None:
    slower = [[(size, 1.1 * size / speed) for size in (10, 30, 47)] for speed in WORKERS]

    figures = gpu.cluster_figures(cluster(after=slower))

    assert figures["disturbed"]
    assert figures["drift"] == pytest.approx(0.1)


def timed(ratio: float) -> gpu.Found:
    """Return what is found where every step but the cold ones is read as ``ratio`` of the truth."""
    times_s = [(9.0, 9.0)] * 2 + [(0.01 * k, 0.05) for k in range(1, 4)]
    read_s = [(step, ratio * times_s[step][0]) for step in range(2, 5)]
    mine = {
        "shares": (30, 10),
        "times_s": times_s,
        "read_s": read_s,
        "cold_steps": 2,
        "kernels_s": 0.018,
        "profiled_read_s": [0.01, 0.03],
    }
    blind = {**mine, "read_s": [], "profiled_read_s": []}
    host = [{"share": 7, "true_s": 0.02, "step_s": 0.03, "read_s": 0.02, "ratio": 1.0}, {}]
    place = {"devices": ["card", "cpu"], "backend": "gloo"}
    return {**place, "host": host, "others wait": mine, "worker 0 waits": blind}


@pytest.mark.parametrize(
    ("ratio", "within"), [(1.029, True), (1.031, False), (0.971, True), (0.969, False)]
)
def test_a_reading_is_within_three_percent_of_the_truth_or_not(ratio: float, within: bool) -> None:
    figures = gpu.timing_figures(timed(ratio))

    assert figures["others wait"]["ratio"] == pytest.approx(ratio)
    assert figures["others wait"]["true_s"] == pytest.approx(0.02)
    assert figures["others wait"]["within"] is within
    assert figures["others wait"]["kernels_of_read"] == pytest.approx(0.9)
    assert figures["host waits"]["within"]


def test_what_was_not_read_is_not_within_anything() -> None:
    blind = gpu.timing_figures(timed(1.0))["worker 0 waits"]

    assert blind["ratio"] is None
    assert blind["kernels_of_read"] is None
    assert not blind["within"]


def priced(slower: float, own_s: tuple[float, ...] = (0.1e-3, 0.14e-3)) -> gpu.Found:
    blocks = {"plain": [0.02] * 4, "again": [0.0201] * 4, "evenstride": [0.02 * slower] * 4}
    place = {"devices": ["card"], "backend": "", "global_batch": 96}
    return {**place, "blocks": blocks, "own_s": own_s}


@pytest.mark.parametrize(("slower", "met"), [(1.0149, True), (1.0151, False)])
def test_the_cost_is_under_one_percent_beyond_the_control_or_unresolved(
    slower: float, met: bool
) -> None:
    figures = gpu.budget_figures(priced(slower))

    assert figures["control"]["ratio"] == pytest.approx(1.005)
    assert figures["under_1_percent"] is met


@pytest.mark.parametrize(
    ("own_s", "kept"), [((0.149e-3, 0.1e-3), True), ((0.1e-3, 0.151e-3), False)]
)
def test_the_worst_worker_s_own_time_keeps_the_budget_of_the_step_s_length(
    own_s: tuple[float, ...], kept: bool
) -> None:
    figures = gpu.budget_figures(priced(1.0, own_s))

    assert figures["budget_s"] == pytest.approx(0.15e-3)
    assert figures["own_s"] == max(own_s)
    assert figures["within_budget"] is kept


def shared() -> gpu.Found:
    calm = {"blocks": {"uniform": [0.03] * 3, "adaptive": [0.03] * 3}, "shares": (64, 64)}
    burdened = {"blocks": {"uniform": [0.06] * 3, "adaptive": [0.04] * 3}, "shares": (90, 38)}
    place = {"devices": ["card", "card"], "backend": "gloo", "global_batch": 128}
    return {**place, "calm": calm, "burdened": burdened}


def test_a_launch_s_lines_tell_its_figures() -> None:
    parts = {"cluster cnn": cluster(), "timing": timed(1.05), "budget one": priced(1.0)}
    parts["sharing"] = shared()
    told = {}
    for name, found in parts.items():
        figures = getattr(gpu, f"{name.split()[0]}_figures")(found)
        done = {"found": found, "figures": figures, "took_s": 61.4}
        told[name] = "\n".join(gpu.lines(name, done))

    assert told["cluster cnn"].startswith("--- cluster cnn: card + cpu + cpu, gloo; took 61 s")
    assert "speed-up 4.0000" in told["cluster cnn"]
    assert "against static:100,30,10" in told["cluster cnn"]
    assert "DISTURBED" not in told["cluster cnn"]
    assert "ratio 1.0500: NOT within 3 %; kernels fill 0.900" in told["timing"]
    assert "worker 0 waits  true 20.000 ms; nothing was read" in told["timing"]
    assert "own time 0.140 ms, budget 0.150 ms: kept" in told["budget one"]
    assert "--- budget one: card; took" in told["budget one"]
    assert "speed-up 1.5000 (95 % 1.5000 to 1.5000), shares 90/38" in told["sharing"]


class Pool:
    """Stands for processes: returns what it is given, or fails with it."""

    def __init__(self, outcome: gpu.Found | Exception) -> None:
        self.outcome, self.timeouts_s = outcome, list[float]()

    def run(self, work: Any, workers: int, job: gpu_ranks.Job, timeout_s: float) -> list[gpu.Found]:
        assert work is gpu_ranks.budget
        assert workers == len(job.devices)
        self.timeouts_s.append(timeout_s)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return [self.outcome]


def small_job() -> gpu_ranks.Job:
    return gpu_ranks.Job(("cpu",), ((0,),), Net("cnn", 8), seconds=40.0, step_s=0.02)


def test_a_launch_has_a_deadline_and_does_not_begin_when_too_little_is_left() -> None:
    pool: Any = Pool(priced(1.0))

    done = [gpu.perform(pool, "budget one", small_job(), left_s) for left_s in (400.0, 80.0, 60.0)]

    assert pool.timeouts_s == [210.0, 80.0]
    assert ["failed" in one for one in done] == [False, False, True]
    assert "60 s are left" in done[2]["failed"]
    assert done[0]["figures"]["within_budget"]


def test_a_launch_that_fails_says_why_and_leaves_the_others_their_turn() -> None:
    pool: Any = Pool(AssertionError("1 of 2 ranks failed"))

    done = gpu.perform(pool, "budget one", small_job(), 400.0)

    assert gpu.lines("budget one", done) == [
        "--- budget one FAILED: AssertionError: 1 of 2 ranks failed"
    ]


@pytest.mark.parametrize(("outcome", "code"), [(priced(1.0), 0), (AssertionError("late"), 1)])
def test_a_run_performs_the_parts_asked_for_and_writes_what_it_was_measured_on(
    outcome: gpu.Found | Exception,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Entered(Pool):
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(gpu, "RankPool", lambda: Entered(outcome))
    monkeypatch.setattr(gpu, "steady", lambda: None)
    out = tmp_path / "new" / "gpu.json"

    assert gpu.main(["--device", "cpu", "--parts", "budget", "--out", str(out)]) == code

    written = json.loads(out.read_text())
    assert list(written["launches"]) == ["budget one", "budget two"]
    assert {"date", "device", "torch", "cores", "quick"} <= written.keys()
    assert written["torch"] == torch.__version__
    assert "--- budget two" in capsys.readouterr().out


def test_without_a_gpu_one_line_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert gpu.main([]) == 2

    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert "needs an NVIDIA GPU" in told.err


def test_a_part_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["--parts", "timing,luck"])

    assert "there is no part 'luck'" in capsys.readouterr().err
