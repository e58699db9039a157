"""A bag of simulations: each is finished once, after any kill, and partial files do not count."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.ions import bag as bags
from examples.ions.bag import (
    RANGES,
    Bag,
    Claim,
    ClaimLost,
    Design,
    Machine,
    NewMachineBetter,
    make_bag,
    spread,
    work,
)
from examples.ions.simulate import Settings, Simulation
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.reliability import Bathtub, TwoRates
from evenstride.testing import FakeClock
from tests.messages import check_message, raises_message

LEASE_S = 10.0
SETTINGS = Settings(ions=4, replicas=2, equilibrate=1, sweeps=3, bins=8)
DESIGN = Design(spread(3, seed=1), SETTINGS, 5, LEASE_S, beat_sweeps=1, save_sweeps=2)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000.0)


@pytest.fixture
def bag(tmp_path: Path, clock: FakeClock) -> Bag:
    return filled(tmp_path, clock)


def filled(folder: Path, clock: FakeClock, design: Design = DESIGN) -> Bag:
    make_bag(folder, design)
    return Bag(folder, clock)


def taken(bag: Bag, worker: str) -> Claim:
    claim = bag.claim(worker)
    assert claim is not None
    return claim


def never() -> bool:
    return False


def no_wait(seconds: float) -> None:
    raise AssertionError(f"the worker waits for {seconds} s")


class StopsAfter:
    """Stops a worker after a number of calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def density(bag: Bag, job: int) -> torch.Tensor:
    found: torch.Tensor = bag.result(job)["density_molar"]
    return found


def test_one_worker_finishes_everything_and_leaves(bag: Bag) -> None:
    finished = work(bag, "one", never, no_wait)

    assert finished == 3
    assert bag.finished() == [0, 1, 2]
    assert bag.status() == {
        "jobs": 3,
        "finished": 3,
        "running": 0,
        "waiting": 0,
        "claims": 3,
        "taken_over": 0,
        "handed_back": 0,
        "resumed": 0,
        "lost_s": 0.0,
    }
    assert not list((bag.folder / "states").iterdir()), "states of finished simulations are removed"


def test_a_held_simulation_is_not_given_to_another_worker(bag: Bag) -> None:
    held = [taken(bag, name).job for name in ("a", "b", "c")]

    assert held == [0, 1, 2]
    assert bag.claim("d") is None
    assert bag.status()["running"] == 3


def test_a_silent_worker_is_replaced_after_the_lease_and_not_before(
    bag: Bag, clock: FakeClock
) -> None:
    dead = taken(bag, "dead")
    run = DESIGN.simulation(dead.job)
    run.advance(2)
    clock.spend(3)
    dead.beat()
    dead.save(run)
    clock.spend(4)
    dead.beat()

    clock.spend(LEASE_S)
    at_the_lease = taken(bag, "next")
    clock.spend(0.1)
    after = taken(bag, "next")

    assert (at_the_lease.job, after.job) == (1, 0)
    state = after.state()
    assert state is not None
    assert state["sweeps"] == 2
    status = bag.status()
    assert (status["taken_over"], status["resumed"], status["lost_s"]) == (1, 1, 4.0)


def test_a_renewed_claim_stays(bag: Bag, clock: FakeClock) -> None:
    claims = [taken(bag, "a") for _ in range(3)]
    for _ in range(5):
        clock.spend(LEASE_S * 0.9)
        for claim in claims:
            claim.beat()

    assert bag.claim("b") is None


def test_a_worker_that_lost_its_claim_gets_an_error_and_its_result_does_not_count(
    bag: Bag, clock: FakeClock
) -> None:
    paused = taken(bag, "paused")
    run = DESIGN.simulation(paused.job)
    run.advance(10)
    clock.spend(LEASE_S + 1)
    quick = taken(bag, "quick")

    with raises_message(ClaimLost):
        paused.beat()

    assert quick.job == paused.job
    assert quick.finish(run)
    assert not paused.finish(run)
    assert bag.finished() == [0]


def test_one_of_two_workers_takes_over_an_expired_claim(bag: Bag, clock: FakeClock) -> None:
    taken(bag, "dead")
    clock.spend(LEASE_S + 1)

    first, second = Claim(bag, 0, 2), Claim(bag, 0, 2)

    assert first.take("a")
    assert not second.take("b")
    assert taken(bag, "b").job == 1


@pytest.mark.parametrize("stopped_at", range(4))
def test_a_stopped_worker_releases_its_claim_and_another_continues_at_once(
    tmp_path: Path, clock: FakeClock, stopped_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = filled(tmp_path / "whole", clock)
    work(whole, "one", never, no_wait)
    sweep, swept = Simulation.sweep, list[Simulation]()

    def counted(run: Simulation) -> None:
        swept.append(run)
        sweep(run)

    monkeypatch.setattr(Simulation, "sweep", counted)
    bag = filled(tmp_path / "cut", clock)

    finished = work(bag, "stopped", StopsAfter(1 + stopped_at), no_wait)
    rest = work(bag, "other", never, no_wait)

    assert finished + rest == 3
    assert bag.status()["handed_back"] == 1
    assert bag.status()["lost_s"] == 0
    assert len(swept) == 3 * (SETTINGS.equilibrate + SETTINGS.sweeps), "no sweep is repeated"
    for job in range(3):
        assert torch.equal(density(bag, job), density(whole, job))


def test_a_worker_chooses_by_the_sweeps_that_are_left(bag: Bag, clock: FakeClock) -> None:
    taken(bag, "keeps it")
    interrupted = taken(bag, "is killed")
    run = bag.design.simulation(1)
    run.advance(3)
    interrupted.save(run)
    clock.spend(LEASE_S + 1.0)
    taken(bag, "goes on with the first")
    offered: list[list[int]] = []

    def last(left: Sequence[int]) -> int:
        offered.append(list(left))
        return len(left) - 1

    claims = [bag.claim("chooses", last) for _ in range(3)]

    assert offered == [[1, 4], [1]], "of 4 sweeps; a held simulation is not offered"
    assert [claim and claim.job for claim in claims] == [2, 1, None]


def test_a_machine_takes_the_longest_simulation_that_fits_its_expected_life() -> None:
    clock = FakeClock(0.0)
    machine = Machine(TwoRates(0.8, 60.0, 6000.0), 0.0, clock)  # 1,248 s on average at first
    assert machine.choose([30, 10, 20]) == 0, "the speed is not known yet"

    machine.has_run(sweeps=10, took_s=1000.0)

    assert machine.choose([30, 10, 20]) == 1
    clock.spend(600.0)  # now it is of the long-lived kind
    assert machine.choose([30, 10, 20]) == 0


def test_a_machine_at_its_end_takes_nothing_and_its_worker_ends(
    bag: Bag, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(Bathtub(0.4, 3600.0, 1800.0, 86_400.0), 86_000.0, clock)
    monkeypatch.setattr(Simulation, "sweep", lambda _: clock.spend(60.0))

    with pytest.raises(NewMachineBetter):
        work(bag, "old", never, no_wait, machine)

    assert bag.finished() == [0], "the first one measures the speed"
    assert bag.status()["running"] == 0


def test_partial_files_do_not_count(bag: Bag) -> None:
    (bag.folder / "results" / ".00001.pt.123.abc.tmp").write_bytes(b"half")
    (bag.folder / "states" / ".00000.1.pt.123.abc.tmp").write_bytes(b"half")
    (bag.folder / "claims" / ".00002.1.abc.tmp").write_bytes(b"half")

    assert bag.finished() == []
    assert taken(bag, "a").state() is None
    assert work(bag, "b", never, lambda _: clock_on(bag)) == 3


def clock_on(bag: Bag) -> None:
    clock = bag.clock
    assert isinstance(clock, FakeClock)
    clock.spend(LEASE_S)


actions = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]), st.sampled_from(["die", "stop", "advance", "time"])
    ),
    max_size=20,
)


@given(script=actions)
def test_whatever_happens_to_workers_each_simulation_is_finished_once(
    script: list[tuple[str, str]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        clock = FakeClock(1000.0)
        bag = filled(Path(folder), clock)
        held: dict[str, Claim] = {}
        counted: list[int] = []
        for worker, what in script:
            claim = held.get(worker) or bag.claim(worker)
            clock.spend(6.0 if what == "time" else 0.5)
            if claim is None:
                continue
            held[worker] = claim
            if what == "die":
                del held[worker]
            elif what == "stop":
                claim.hand_back()
                del held[worker]
            elif what == "advance" and not advanced(claim):
                counted += [claim.job] * claim.finish(bag.design.simulation(claim.job))
                del held[worker]
        clock.spend(LEASE_S + 1)
        rest = work(bag, "last", never, no_wait)

        assert bag.finished() == [0, 1, 2]
        assert len(set(counted)) == len(counted)
        assert rest == 3 - len(counted)


def advanced(claim: Claim) -> bool:
    """Do some more work. Return False if the simulation is finished or the claim is lost."""
    run = claim.bag.design.simulation(claim.job)
    state = claim.state()
    if state is not None:
        run.load_state_dict(state)
    if run.done:
        return False
    run.advance(2)
    try:
        claim.beat()
    except ClaimLost:
        return False
    claim.save(run)
    return True


def test_another_bag_in_the_same_folder_is_refused(bag: Bag) -> None:
    with raises_message(SystemExit):
        make_bag(bag.folder, replace(DESIGN, seed=6))

    assert Bag(bag.folder).design == DESIGN


@pytest.mark.parametrize(
    "asked",
    [
        {"seed": 6},
        {"points": DESIGN.points[:2], "settings": replace(SETTINGS, sweeps=4)},
        {"points": spread(3, seed=2)},
    ],
)
def test_differences_from_the_existing_bag_are_named(bag: Bag, asked: dict[str, Any]) -> None:
    with pytest.raises(SystemExit) as end:
        make_bag(bag.folder, replace(DESIGN, **asked))

    check_message(str(end.value))


def test_a_folder_that_is_no_bag_says_what_to_do(tmp_path: Path) -> None:
    with raises_message(SystemExit):
        Bag(tmp_path)


def test_points_fill_their_ranges_however_many_are_finished() -> None:
    points = torch.tensor(spread(64, seed=3), dtype=torch.float64)

    low, high = torch.tensor(RANGES, dtype=torch.float64).T
    part = (points - low) / (high - low)
    assert part.min() >= 0
    assert part.max() <= 1
    for first in (8, 16, 32, 64):
        eighths = torch.histc(part[:first, 0], 8, 0, 1)
        assert eighths.tolist() == [first / 8] * 8
    assert spread(64, seed=3) == tuple(map(tuple, points.tolist()))
    assert spread(8, seed=4) != spread(8, seed=3)


def test_the_command_line_makes_a_bag_and_prints_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "bag")
    command = ["bag", "make", folder, "--jobs", "5", "--sweeps", "7", "--lease", "3", "--json"]
    monkeypatch.setattr(sys, "argv", command)

    bags.main()

    status = json.loads(capsys.readouterr().out)
    assert (status["jobs"], status["waiting"]) == (5, 5)
    design = Bag(Path(folder)).design
    assert (design.settings.sweeps, design.lease_s) == (7, 3.0)
    assert design.points == spread(5, 0)


def test_the_command_line_gives_the_machine_its_age_and_its_recording(
    bag: Bag, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, given = bag.folder / "spot.csv", list[Machine | None]()
    path.write_text("at_s,up\n" + "".join(f"{60 * n},{int(n % 8 > 1)}\n" for n in range(60)))
    monkeypatch.setattr(bags, "work_until_signal", lambda _, machine: given.append(machine))
    command = ["bag", "work", str(bag.folder), "--recording", str(path), "--age", "100000"]
    monkeypatch.setattr(sys, "argv", command)

    bags.main()

    (machine,) = given
    assert machine is not None
    machine.has_run(1, 1.0)
    assert machine.choose([1]) == 0, "with seven losses, the rate is constant"


def test_a_recording_that_cannot_be_read_is_an_error(
    bag: Bag, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bag", "work", str(bag.folder), "--recording", str(bag.folder / "none.csv")]
    monkeypatch.setattr(sys, "argv", command)

    with pytest.raises(SystemExit):
        bags.main()

    check_message(capsys.readouterr().err.partition("error: ")[2])
