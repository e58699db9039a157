"""The GPU benchmark without ranks: its launches, its figures from findings, and its output."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import gpu, gpu_ranks
from benchmarks.gpu_training import between_s
from hypothesis import given
from hypothesis import strategies as st

from tests.messages import check_message

WORKERS = (1000.0, 300.0, 100.0)  # samples per second, without a fixed time


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12))
def test_what_spans_cover_counts_once(starts: list[tuple[int, int]]) -> None:
    inside = {t for start, length in starts for t in range(start, start + length)}

    assert gpu_ranks.covered([(a, a + length) for a, length in starts]) == len(inside)


def test_marks_of_a_stream_are_in_seconds_like_those_of_the_clock() -> None:
    first = SimpleNamespace(elapsed_time=lambda second: second.at - 1.0)

    assert between_s(first, SimpleNamespace(at=26.0)) == pytest.approx(0.025)
    assert between_s(1.5, 1.75) == 0.25


def cluster(**changed: Any) -> gpu.Found:
    """Return findings of workers without fixed times: 140 samples, equal 466.7 ms, best 100 ms."""
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
    # The slowest worker's 46 or 47 of 140 samples, divided by 100 ms, the balanced step.
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
    """Return findings in which every step after the cold ones is read as ``ratio`` of its time."""
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


class Pool:
    """Stands for processes. Returns the given outcome, or raises it."""

    def __init__(self, outcome: gpu.Found | Exception) -> None:
        self.outcome, self.timeouts_s = outcome, list[float]()

    def run(self, work: Any, workers: int, job: gpu_ranks.Job, timeout_s: float) -> list[gpu.Found]:
        assert work is gpu_ranks.budget
        assert workers == len(job.devices)
        self.timeouts_s.append(timeout_s)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return [self.outcome]


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

    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert "needs an NVIDIA GPU" in printed.err


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["--parts", "timing,luck"])

    check_message(capsys.readouterr().err, "'luck'")
