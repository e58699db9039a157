"""Starting, watching and ending workers: real processes, played by a light stand-in."""

from __future__ import annotations

import json
import os
import select
import tempfile

import pytest

from evenstride.errors import LaunchError, LimitError
from evenstride.lab.processes.local_launch import LaunchProgress, run
from evenstride.lab.processes.speeds import SpeedChange, pin
from tests.messages import raises_message
from tests.unit.lab.fake_runs import SpyLimits
from tests.unit.lab.stage import Stage


def test_workers_of_a_job_go_through_torchrun_and_report_as_ranks(stage: Stage) -> None:
    stage.orders["facts"] = str(stage.folder)

    run(stage.launch(1.0, 0.5), SpyLimits(), stage.folder / "logs")

    assert stage.said() == b"loose\n" * 2
    for rank in range(2):
        assert stage.facts(rank)["arguments"] == [
            *[
                "-m",
                "evenstride.runtime.launching.die_with_parent",
                "-m",
                "evenstride.lab.processes.rendezvous",
                "--nproc-per-node=2",
            ],
            *["-m", "evenstride.lab.processes.lab_worker", "train.py", "--lr", "0.1"],
        ]
    log = (stage.folder / "logs" / "workers.log").read_text()
    assert sorted(log.splitlines()) == [f"worker {rank} has had enough" for rank in range(2)]


def test_workers_that_run_alone_are_ranks_of_one_with_variables_of_their_own(stage: Stage) -> None:
    stage.orders["facts"] = str(stage.folder)

    run(stage.launch(1.0, 0.5, alone=True), SpyLimits(), stage.folder / "logs")

    for worker in range(2):
        facts = stage.facts(worker)
        assert facts["arguments"] == [
            "-m",
            "evenstride.runtime.launching.die_with_parent",
            "-m",
            "evenstride.lab.processes.lab_worker",
            "train.py",
            "--lr",
            "0.1",
        ]
        assert facts["environment"]["OWN"] == f"of worker {worker}"
        assert facts["environment"]["RANK"] == facts["environment"]["LOCAL_RANK"] == "0"
        assert facts["environment"]["WORLD_SIZE"] == "1"
        assert facts["environment"]["MASTER_ADDR"] == "127.0.0.1"
        assert facts["environment"]["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert facts["environment"]["_EVENSTRIDE_PROGRESS"] == ""
        log = (stage.folder / "logs" / f"worker-{worker}.log").read_text()
        assert log == f"worker {worker} has had enough\n"


def test_what_steadies_times_is_set_and_can_be_overridden(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.orders["facts"] = str(stage.folder)
    monkeypatch.setenv("EVENSTRIDE_POLICY", "of the caller")
    environment = {"EVENSTRIDE_POLICY": "uniform"}

    run(stage.launch(1.0, environment=environment), SpyLimits(), stage.folder)
    usual = stage.facts(0)["environment"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    run(stage.launch(1.0), SpyLimits(), stage.folder)
    asked = stage.facts(0)["environment"]

    assert (usual["OMP_NUM_THREADS"], usual["EVENSTRIDE_POLICY"]) == ("1", "uniform")
    assert (asked["OMP_NUM_THREADS"], asked["EVENSTRIDE_POLICY"]) == ("3", "of the caller")


def test_each_worker_is_limited_before_any_is_let_loose_and_free_afterwards(stage: Stage) -> None:
    class Strict(SpyLimits):
        def set_speed(self, worker: int, speed: float) -> None:
            ready = select.select([stage.leash], [], [], 0.0)[0]
            assert speed == 1.0 or not ready, "a worker was let loose before it was limited"
            super().set_speed(worker, speed)

    limits = Strict()

    run(stage.launch(0.5, 0.25), limits, stage.folder)

    assert [worker for worker, _ in limits.joined] == [0, 1]
    assert len({pid for _, pid in limits.joined}) == 2
    assert limits.speeds == [(0, 0.5), (1, 0.25), (0, 1.0), (1, 1.0)]
    assert limits.closed == 0, "the caller's limits are the caller's to close"


def test_speeds_change_when_the_leader_has_done_the_steps(stage: Stage) -> None:
    stage.orders["steps"] = 60
    stage.gate()
    limits, seen = SpyLimits(), list[LaunchProgress]()
    changes = (
        SpeedChange((0.5, 1.0), at_step=60),
        SpeedChange((0.1, 0.1), at_step=61),
        SpeedChange((0.2, 0.2), at_s=3600.0),
    )

    def watch(standing: LaunchProgress) -> None:
        seen.append(standing)
        if (1, 1.0) in limits.speeds:
            stage.open()

    run(stage.launch(1.0, 0.5, changes=changes), limits, stage.folder, watch)

    assert limits.speeds == [(0, 1.0), (1, 0.5), (0, 0.5), (1, 1.0), (0, 1.0), (1, 1.0)]
    assert seen[-1].step == 60
    assert [s.elapsed_s for s in seen] == sorted(s.elapsed_s for s in seen)


@pytest.fixture
def cores(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The core that each process was pinned to last, on a machine with two."""
    pinned: dict[int, int] = {}
    monkeypatch.setattr("evenstride.lab.processes.local_launch.pin", pinned.__setitem__)
    monkeypatch.setattr("evenstride.lab.processes.local_launch.usable_cpus", lambda: 2)
    return pinned


def test_workers_are_pinned_so_that_no_core_is_asked_for_too_much(
    stage: Stage, cores: dict[int, int]
) -> None:
    limits = SpyLimits()

    run(stage.launch(0.2, 1.0, 0.5), limits, stage.folder)

    assert [cores[pid] for _, pid in limits.joined] == [1, 0, 1]


def test_workers_are_placed_again_when_their_speeds_change(
    stage: Stage, cores: dict[int, int]
) -> None:
    stage.gate()
    limits, later = SpyLimits(), (0.2, 0.5, 1.0)

    def watch(_: LaunchProgress) -> None:
        if (2, 1.0) in limits.speeds:
            stage.open()

    changes = (SpeedChange(later, at_s=0.0),)
    run(stage.launch(1.0, 0.5, 0.2, changes=changes), limits, stage.folder, watch)

    asked = [0.0, 0.0]
    for worker, pid in limits.joined:
        asked[cores[pid]] += later[worker]
    assert max(asked) <= 1.0


NO_PLACE = (0.7, 0.7, 0.6)


@pytest.mark.parametrize(
    ("first", "changes"),
    [
        (NO_PLACE, ()),
        ((1.0, 0.5, 0.2), (SpeedChange(NO_PLACE, at_s=0.0),)),
    ],
    ids=["at once", "later on"],
)
def test_workers_that_find_no_place_may_run_anywhere(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    first: tuple[float, ...],
    changes: tuple[SpeedChange, ...],
) -> None:
    usable = os.sched_getaffinity(0)
    if len(usable) < 2:
        pytest.skip("needs two cores")
    monkeypatch.setattr("evenstride.lab.processes.local_launch.pin", pin)
    monkeypatch.setattr("evenstride.lab.processes.local_launch.usable_cpus", lambda: 2)
    stage.gate()
    limits, bound = SpyLimits(), dict[int, set[int]]()

    def watch(_: LaunchProgress) -> None:
        if (2, 0.6) in limits.speeds and not bound:
            bound.update({worker: os.sched_getaffinity(pid) for worker, pid in limits.joined})
            stage.open()

    run(stage.launch(*first, changes=changes), limits, stage.folder, watch)

    assert bound == dict.fromkeys(range(3), usable)


def test_speeds_change_when_the_time_has_come(stage: Stage) -> None:
    stage.gate()
    limits = SpyLimits()

    def watch(_: LaunchProgress) -> None:
        if (0, 0.25) in limits.speeds:
            stage.open()

    run(stage.launch(1.0, changes=(SpeedChange((0.25,), at_s=0.0),)), limits, stage.folder, watch)

    assert limits.speeds == [(0, 1.0), (0, 0.25), (0, 1.0)]


def test_a_parameter_server_is_not_limited_with_the_worker_that_starts_it(stage: Stage) -> None:
    stage.orders["serve"] = 1
    stage.gate()
    limits = SpyLimits()

    def watch(_: LaunchProgress) -> None:
        if limits.left:
            stage.open()

    run(stage.launch(1.0, 0.5), limits, stage.folder, watch)

    (server,) = limits.left
    assert server not in [pid for _, pid in limits.joined]


def test_a_worker_that_fails_is_reported_with_its_last_output(stage: Stage) -> None:
    stage.orders["exit"] = 3
    limits = SpyLimits()

    with raises_message(LaunchError, varies=[r"worker \d"]):
        run(stage.launch(0.5, 0.5), limits, stage.folder)

    assert stage.said() == b"loose\n" * 2
    assert limits.speeds[-2:] == [(0, 1.0), (1, 1.0)]


def test_when_one_fails_alone_the_others_are_ended(stage: Stage) -> None:
    stage.orders["hang"] = True
    launch = stage.launch(1.0, 1.0, alone=True)
    stage.gate()
    launch.alone[1]["STAND_IN"] = json.dumps({"exit": 4, "wait": stage.orders.pop("wait")})

    def watch(_: LaunchProgress) -> None:
        if select.select([stage.leash], [], [], 0.0)[0]:  # the other one is at work
            stage.open()

    with raises_message(LaunchError):
        run(launch, SpyLimits(), stage.folder, watch)

    assert stage.said() == b"loose\n"


@pytest.mark.parametrize("alone", [False, True], ids=["job", "alone"])
def test_a_run_past_its_deadline_is_ended_with_all_its_workers(stage: Stage, alone: bool) -> None:
    stage.orders["hang"] = True

    with raises_message(LaunchError, "0 s"):
        run(stage.launch(1.0, 1.0, alone=alone, deadline_s=0.0), SpyLimits(), stage.folder)

    stage.said()


def test_a_watcher_that_raises_leaves_no_worker(stage: Stage) -> None:
    stage.orders["hang"] = True

    def interrupted(_: LaunchProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(stage.launch(1.0, 1.0), SpyLimits(), stage.folder, interrupted)

    stage.said()


def test_limits_that_cannot_be_set_leave_no_worker(stage: Stage) -> None:
    class Refusing(SpyLimits):
        def join(self, worker: int, pid: int) -> None:
            super().join(worker, pid)
            raise LimitError(f"process {pid} could not be limited")

    stage.orders["hang"] = True

    with raises_message(LimitError):
        run(stage.launch(1.0), Refusing(), stage.folder)

    assert stage.said() == b"", "it was never let loose"


def test_nothing_is_left_in_the_folder_for_temporary_files(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = stage.folder / "tmp"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    run(stage.launch(1.0), SpyLimits(), stage.folder)

    assert list(scratch.iterdir()) == []
