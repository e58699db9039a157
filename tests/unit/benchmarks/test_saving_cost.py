"""What the benchmark of saving is asked, computes from what ranks found, and prints; no rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import saving
from benchmarks.saving import Block, Held
from hypothesis import given
from hypothesis import strategies as st

PARTS_S = dict.fromkeys(saving.PARTS, (0.25, 0.5))


def rank(slower: float = 1.01, drift: float = 1.0, failed: int = 0, slow: float = 1.0) -> Any:
    """Return what a rank finds: steps of 1 s, of ``slower`` with checkpoints; ``drift`` per block.

    Args:
        slower: a step with checkpoints over one without.
        drift: of the machine, a factor from block to block.
        failed: saves.
        slow: factor of this rank's copies.
    """
    rounds = []
    for number in range(4):
        first = 1.0 + (drift - 1.0) * 2 * number
        middle, last = first + (drift - 1.0), first + 2 * (drift - 1.0)
        steps = (first, middle * slower, last)
        rounds.append(tuple(Block(30, step_s, 2.0 * step_s) for step_s in steps))
    report = {"saved": 9, "failed": failed, "save_s": 4.5, "written_bytes": 900.0}
    return {
        "batch": 32,
        "parameters": 2_000_000,
        "first": Held(0.5 * slow, 0.0),
        "later": [Held(0.1 * slow, 0.0), Held(0.2 * slow, 0.01)] * 4,
        "rounds": rounds,
        "report": report,
        "parts_s": PARTS_S,
    }


def test_the_cost_is_a_block_with_checkpoints_over_the_two_around_it() -> None:
    found = saving.judge([rank(1.01), rank(1.01, slow=3.0)])

    assert found["cost"] == pytest.approx(0.01)
    assert found["control"] == pytest.approx(0.0)
    assert found["processor_save_s"] == pytest.approx(30 * 2.0 * 0.01)
    assert found["processor_step_s"] == pytest.approx(2.0)
    assert found["step_s"] == pytest.approx(1.0)
    assert found["interval_steps"] == 30
    assert found["verdict"] == "met"


def test_a_steady_drift_is_in_the_control_and_not_in_the_cost() -> None:
    found = saving.judge([rank(1.01, drift=1.1)])

    assert found["cost"] == pytest.approx(0.01)
    assert found["control"] > 0.1


def test_copies_are_those_of_the_rank_that_took_longest_and_bytes_those_of_all() -> None:
    found = saving.judge([rank(), rank(slow=3.0)])

    assert found["first_copied_s"] == pytest.approx(1.5)
    assert found["copied_s"] == pytest.approx(0.45)
    assert found["most_copied_s"] == pytest.approx(0.6)
    assert found["blocked_s"] == pytest.approx(0.04)
    assert found["checkpoint_bytes"] == 200
    assert found["thread_s"] == pytest.approx(0.5)
    assert (found["saves"], found["rounds"]) == (9, 4)


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [(0.0, 0.02, "met"), (0.01, 0.021, "unresolved"), (0.021, 0.04, "over"), (-0.1, 0.0, "met")],
)
def test_an_interval_is_judged_by_two_percent(low: float, high: float, told: str) -> None:
    assert saving.verdict((low, high), (-0.02, 0.01)) == told
    assert saving.verdict((low, high), (-0.021, 0.01)) == "unresolved"


@given(st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=9))
def test_an_interval_lies_within_the_values(values: list[float]) -> None:
    low, high = saving.interval(values)

    assert min(values) <= low <= high <= max(values)


@pytest.mark.parametrize(
    ("step_s", "batch"), [(0.5, 30), (0.1, 1), (9.0, saving.LARGEST_BATCH), (0.3, 10)]
)
def test_the_batch_is_where_the_line_through_two_sizes_meets_the_step(
    step_s: float, batch: int
) -> None:
    assert saving.batch_for(step_s, [(4, 0.24), (32, 0.52)]) == batch


def test_a_batch_that_seems_to_take_no_time_is_as_large_as_allowed() -> None:
    assert saving.batch_for(0.5, [(4, 0.3), (32, 0.2)]) == saving.LARGEST_BATCH


@given(st.integers(10_000, 10**9))
def test_layers_have_about_the_parameters_asked_for(parameters: int) -> None:
    width = saving.width_for(parameters)

    assert saving.DEPTH * width**2 == pytest.approx(parameters, rel=0.05)


class Saves:
    """Stands for a checkpointer: saves at the calls named, and takes a tenth of a second each."""

    def __init__(self, at: set[int]) -> None:
        self._at, self._calls, self._saved, self.waited = at, 0, 0, False

    def step(self) -> None:
        self._calls += 1
        self._saved += self._calls in self._at

    def wait(self) -> None:
        self.waited = True

    def report(self) -> dict[str, float]:
        return {"copied_s": 0.1 * self._saved, "blocked_s": 0.0}


def test_a_block_with_checkpoints_goes_from_one_save_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now_s=0.0)

    def ticking() -> Iterator[None]:
        while True:
            clock.now_s += 2.0
            yield

    steps = ticking()
    training: Any = object.__new__(saving.Training)
    training.checkpoint, training.step = Saves({3, 8}), lambda: next(steps)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now_s)
    monkeypatch.setattr("time.process_time", lambda: 3.0 * clock.now_s)
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)

    block, held = training.saving()

    assert block == Block(5, 2.0, 6.0)
    assert [one.copied_s for one in held] == pytest.approx([0.1, 0.1])
    assert training.checkpoint.waited
    assert clock.now_s == 16.0


def test_what_is_found_is_told_with_its_doubts() -> None:
    found = saving.judge([rank(1.05), rank(1.05)]) | {"filesystem": "ext4", "every_s": 30.0}

    told = "\n".join(saving.lines(found))

    assert "2.0 M parameters, 32 samples per rank, a step of 1.000 s" in told
    assert "step time    +5.00%, 95 % +5.00% to +5.00%, 4 rounds" in told
    assert "A/A          +0.00%" in told
    assert "first save 0.500 s; later ones 0.150 s, at most 0.200 s" in told
    assert "3.00 s of each rank per save, 95 % 3.00 to 3.00; 10.0% of a core" in told
    assert "fsync 0.250 of 0.500 s are processor time" in told
    assert told.endswith("at most 2%: over")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--every", "often"], "says nothing"),
        (["--every", "auto"], "is no duration"),
        (["--every", "0s"], "says nothing"),
        (["--rounds", "2"], "too few"),
        (["--ranks", "0"], "at least 1"),
        (["--parameters", "2"], "at least 3"),
        (["--step-s", "0"], "above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        saving.parse(arguments)

    assert end.value.code == 2
    assert problem in capsys.readouterr().err


def test_what_is_asked_for_is_understood() -> None:
    asked, given_ = saving.parse(["--every", "1min", "--parameters", "1e6", "--adam"])

    assert (asked.every_s, asked.parameters, asked.adam, asked.ranks) == (60.0, 1_000_000, True, 2)
    assert given_.folder is None
    assert asked.limit_s > 3 * asked.rounds * asked.every_s


@pytest.mark.parametrize(("failed", "code"), [(0, 0), (1, 1)])
def test_a_run_saves_below_the_folder_and_leaves_nothing_there(
    failed: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def ranks(work: Any, count: int, asked: saving.Asked, timeout_s: float) -> list[Any]:
        assert work is saving.measure
        assert Path(asked.folder).parent == tmp_path / "new"
        assert timeout_s == asked.limit_s
        return [rank(failed=failed)] * count

    monkeypatch.setattr(saving, "run_ranks", ranks)

    assert saving.main(["--json", "--folder", str(tmp_path / "new"), "--ranks", "3"]) == code

    told = json.loads(capsys.readouterr().out)
    assert told["checkpoint_bytes"] == 300
    assert told["filesystem"]
    assert {"load", "torch", "machine", "every_s"} <= told.keys()
    assert list((tmp_path / "new").iterdir()) == []


def test_the_file_system_is_that_of_the_nearest_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [("/", "ext4"), (str(tmp_path), "tmpfs"), (str(tmp_path / "other"), "nfs")]
    found = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts]
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: found)

    assert saving.filesystem(tmp_path / "deep") == "tmpfs"
    assert saving.filesystem(tmp_path.parent) == "ext4"
