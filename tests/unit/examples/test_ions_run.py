"""Replays of preemptible machines, and the printed outcome."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from examples.ions import bag as bags
from examples.ions import run as runs
from examples.ions import surrogate
from examples.ions.bag import Bag, Design, make_bag, spread, work
from examples.ions.run import Slots, learning_curve, made_up, noise, replay
from examples.ions.simulate import Settings
from examples.ions.surrogate import Feed, Results, is_held_out

from evenstride.planner.spot_recordings import recorded_transience
from tests.messages import check_message


class Fleet:
    """Workers that are only names. Records their starts and kills."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.slots = Slots(self._start, self._kill)

    def _start(self) -> int:
        self.events.append(f"start {self.slots.started}")
        return self.slots.started

    def _kill(self, worker: int) -> None:
        self.events.append(f"kill {worker}")

    def live(self, who: list[list[int]], ticks: int) -> list[str]:
        left = iter([False] * ticks + [True])
        replay(np.array(who), self.slots, lambda: next(left), lambda: None)
        return self.events


def test_a_worker_lives_as_long_as_its_machine() -> None:
    fleet = Fleet()

    events = fleet.live([[0, -1], [0, 1], [-1, 1], [2, 1]], ticks=4)

    assert events == ["start 0", "start 1", "kill 0", "start 2"]
    assert (fleet.slots.started, fleet.slots.killed) == (3, 1)
    assert fleet.slots.here == {0: (2, 2), 1: (1, 1)}


def test_a_machine_in_the_place_of_another_is_a_new_worker() -> None:
    assert Fleet().live([[0], [1]], ticks=2) == ["start 0", "kill 0", "start 1"]


def test_a_trace_that_has_ended_begins_again_with_other_machines() -> None:
    assert Fleet().live([[0], [0]], ticks=3) == ["start 0", "kill 0", "start 1"]


def test_made_up_machines_come_and_go_by_their_seed() -> None:
    who = made_up(2, 2000, seed=0)

    assert who.shape == (2000, 2)
    assert np.array_equal(who, made_up(2, 2000, seed=0))
    assert not np.array_equal(who, made_up(2, 2000, seed=1))
    assert (who >= 0).mean() == pytest.approx(0.75, abs=0.1)
    assert 150 < who.max() < 400


def test_placed_workers_get_the_half_of_the_trace_that_is_replayed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(runs, "start_process", lambda *words, **_: commands.append(words))
    who = made_up(2, 4000, seed=0)
    who[:2000] = 0  # no machine is lost in the first half

    path = runs.write_recording(who, 0.5, tmp_path / "machines.csv")
    runs.start_worker(tmp_path, path)

    _, _, folder, option, given = commands[0]
    assert (folder, option, given) == (str(tmp_path), "--recording", str(path))
    lifetime = recorded_transience(Path(given)).lifetime
    assert float(lifetime.mean_left_s(0.0)) == pytest.approx(12 * 0.5, rel=0.15)


def test_a_trace_without_a_loss_cannot_place_workers(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv += [str(tmp_path / "new"), "--placed", "--jobs", "1"]
    monkeypatch.setattr(runs, "made_up", lambda *_: np.zeros((20, 2), dtype=np.int64))
    monkeypatch.setattr(runs, "start_process", lambda *_: pytest.fail("a process starts"))

    with pytest.raises(SystemExit) as end:
        runs.main()

    check_message(str(end.value))


@pytest.fixture(scope="module")
def bag(tmp_path_factory: pytest.TempPathFactory) -> Bag:
    """Eighteen small simulations, all finished."""
    settings = Settings(ions=6, replicas=2, equilibrate=1, sweeps=2, bins=8)
    filled = make_bag(tmp_path_factory.mktemp("bag"), Design(spread(18, 0), settings, 0, 10.0))
    work(filled, "one", lambda: False, lambda _: None)
    return filled


def test_the_curve_trains_more_and_more_and_never_what_is_held_out(
    bag: Bag, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[torch.Tensor] = []

    def keep(points: torch.Tensor, *_: object) -> None:
        trained.append(points)

    monkeypatch.setattr("examples.ions.run.fit", keep)
    curve = learning_curve(bag, steps=1, seed=0)

    assert [point["simulations"] for point in curve] == [8, 16]
    assert [len(points) for points in trained] == [8, 16]
    held_out, _ = Results(bag).tensors([7, 15])
    assert not any((row == trained[-1]).all(-1).any() for row in held_out)


def test_every_eighth_is_held_out() -> None:
    assert [job for job in range(20) if is_held_out(job)] == [7, 15]


def test_the_noise_is_that_of_the_held_out_simulations(bag: Bag) -> None:
    parts = []
    for job in (7, 15):
        result = bag.result(job)
        square = result["error_molar"].square().mean(-1) / 2
        parts.append((square.sqrt() / result["density_molar"].mean(-1)).mean())

    assert noise(bag) == pytest.approx(float(torch.stack(parts).mean()))


def test_results_are_trained_per_salt_and_with_both_walls_alike(bag: Bag) -> None:
    inputs, outputs = Results(bag).tensors([3])

    salt = bag.design.points[3][1]
    density = bag.result(3)["density_molar"]
    expected = (density + density.flip(-1)) / 2 / salt
    torch.testing.assert_close(outputs[0].reshape(2, -1), expected.float())
    assert 0 <= inputs.min() <= inputs.max() <= 1


def test_the_error_is_unknown_until_a_held_out_simulation_is_finished(
    tmp_path: Path,
) -> None:
    settings = Settings(ions=4, replicas=2, equilibrate=1, sweeps=1, bins=8)
    bag = make_bag(tmp_path, Design(spread(3, 0), settings, 0, 10.0))
    work(bag, "one", lambda: False, lambda _: None)

    assert Results(bag).error(torch.nn.Linear(3, 16)) is None
    assert noise(bag) is None
    curve = learning_curve(bag, steps=1, seed=0)
    assert curve == [{"simulations": 3, "held_out": None}]


def test_an_unknown_error_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    curve = [{"simulations": 3, "held_out": None}, {"simulations": 8, "held_out": 0.125}]
    runs.print_outcome({"jobs": 9, "noise": None, "curve": curve})

    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["jobs", "9"],
        ["noise", "-"],
        ["3", "simulations:", "held-out", "error", "-"],
        ["8", "simulations:", "held-out", "error", "12.50%"],
    ]


def test_training_waits_for_at_most_all_simulations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "examples.ions.surrogate.time.sleep", lambda _: pytest.fail("the training waits")
    )
    settings = Settings(ions=4, replicas=2, equilibrate=1, sweeps=1, bins=8)
    few = make_bag(tmp_path, Design(spread(2, 0), settings, 0, 10.0))
    work(few, "one", lambda: False, lambda _: None)
    stride: Any = None

    assert Feed(few, stride, least=4).found() == [0, 1]


@pytest.fixture
def argv(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line. The command does not change signals or threads of this process."""
    words = ["run.py"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    return words


def interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def test_ctrl_c_tells_how_to_go_on(
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv.append(str(tmp_path))
    monkeypatch.setattr(runs, "run", interrupted)

    with pytest.raises(SystemExit) as end:
        runs.main()

    assert end.value.code == 130
    (line,) = capsys.readouterr().err.splitlines()
    check_message(line)


def test_an_interrupted_rank_exits_without_a_traceback(
    argv: list[str], bag: Bag, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv.append(str(bag.folder))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(surrogate, "train", interrupted)

    with pytest.raises(SystemExit) as end:
        surrogate.main()

    assert end.value.code == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_releases_its_claim_after_a_signal(
    bag: Bag, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def hear(_: object, __: str, stopped: Any, *___: object) -> None:
        assert not stopped()
        signal.raise_signal(number)
        assert stopped()

    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(bags, "work", hear)
    try:
        assert bags.work_until_signal(bag) == number
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


class Process:
    """A process that ends after `terminate`, or only after `kill` if it is stubborn."""

    def __init__(self, calls: list[str], stubborn: bool = False) -> None:
        self.calls, self.stubborn = calls, stubborn

    def terminate(self) -> None:
        self.calls.append("terminate")
        signal.raise_signal(signal.SIGINT)  # an impatient user

    def wait(self, timeout_s: float | None = None) -> None:
        self.calls.append("wait")
        if self.stubborn and timeout_s is not None:
            raise subprocess.TimeoutExpired("it", timeout_s)

    def kill(self) -> None:
        self.calls.append("kill")


def test_all_processes_are_terminated_first_and_killed_if_they_do_not_end() -> None:
    calls: list[str] = []
    processes: list[Any] = [Process(calls), Process(calls, stubborn=True)]
    before = signal.signal(signal.SIGINT, lambda *_: calls.append("interrupted"))
    try:
        runs.end_all(processes)
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)

    ended = ["terminate", "terminate", "wait", "wait", "kill", "wait"]
    assert calls == [*ended, "interrupted"], "an interrupt takes effect only afterwards"


def test_ctrl_c_does_not_reach_started_processes() -> None:
    process = runs.start_process("timeit", "-n1", "-r1", "pass", stdout=subprocess.DEVNULL)
    session = os.getsid(process.pid)

    assert process.wait() == 0
    assert session == process.pid != os.getsid(0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--jobs", "0"), ("--jobs",)),
        (("--jobs", "many"), ("--jobs",)),
        (("--tick", "0"), ("--tick",)),
        (("--lease", "nan"), ("--lease",)),
        (("--trace", "nope"), ()),
    ],
)
def test_invalid_options_are_refused_before_a_folder_is_created(
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: tuple[str, ...],
) -> None:
    argv += [str(tmp_path / "new"), *words]
    monkeypatch.setenv("EVENSTRIDE_DATA", str(tmp_path))  # without data sets, as on any machine
    monkeypatch.setattr(runs, "run", lambda *_: pytest.fail("the command starts"))

    with pytest.raises(SystemExit) as end:
        runs.main()

    assert end.value.code == 2
    check_message(capsys.readouterr().err, *said)
    assert not (tmp_path / "new").exists()


def test_the_help_shows_defaults_an_example_and_that_it_goes_on() -> None:
    text = runs.make_parser().format_help()

    assert "\n    python -m examples.ions.run FOLDER --trace made\n" in text
    check_message(text)
    assert "(default: 64)" in text
    assert "default: None" not in text
    folder = text.partition("positional arguments:")[2].partition("options:")[0]
    check_message(folder)
