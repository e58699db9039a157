"""A bag of simulations in a folder, for workers that may be killed at any moment.

    python -m examples.ions.bag make FOLDER --jobs 64
    python -m examples.ions.bag work FOLDER            # once per core or machine
    python -m examples.ions.bag work FOLDER --recording spot.csv --age 7200
    python -m examples.ions.bag status FOLDER --json

A worker holds a simulation by a claim, the file ``claims/NUMBER.GENERATION``, and renews its
modification time while it works. A claim expires if it is not renewed within the lease. The first
worker that creates the file of the next generation continues from the newest saved state. Claims
are never deleted, so that no worker can remove one that was renewed or replaced meanwhile. Results
are written atomically, and the first one counts.

Several machines need a shared folder, and clocks that differ by much less than the lease. SIGTERM
and Ctrl-C save the state and release the claim. After SIGKILL, the work since the last saved state
is lost.

With a recording of spot machines, a worker chooses simulations by the expected remaining life of
its machine. It ends if a new machine would be better: give the machine back then.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.ions.files import add_whole, read_if_there, read_whole, replace_whole
from examples.ions.model import Slab
from examples.ions.simulate import METHODS, Settings, Simulation

from evenstride.core.reliability import Lifetime, place
from evenstride.errors import EvenstrideError
from evenstride.planner.spot_recordings import recorded_transience

RANGES = ((4.0, 5.0), (0.1, 2.0), (-0.02, -0.01))  # length_nm, salt_molar, charge_c_per_m2
_RELEASED_S = 0.0  # modification time of a released claim
_FOLDERS = ("claims", "states", "results")


Choose = Callable[[Sequence[int]], int | None]
"""Returns which simulation to take, from the sweeps left of each, or ``None`` for none of them."""


class NewMachineBetter(Exception):
    """The machine has so little life left that a new one would be better for all simulations."""


class ClaimLost(Exception):
    """The claim expired, and another worker has taken over the simulation."""


@dataclass(frozen=True, slots=True)
class Design:
    """The contents of a bag.

    Args:
        points: ``length_nm``, ``salt_molar`` and ``charge_c_per_m2`` of each simulation.
        settings: Settings of all simulations.
        seed: Seed of the bag. Simulation ``n`` has the seed ``seed + n``.
        lease_s: Time after which a claim expires if it is not renewed.
        beat_sweeps: Sweeps between renewals of a claim.
        save_sweeps: Sweeps between saved states.
    """

    points: tuple[tuple[float, ...], ...]
    settings: Settings
    seed: int
    lease_s: float
    beat_sweeps: int = 5
    save_sweeps: int = 10

    def simulation(self, job: int) -> Simulation:
        """Return a new simulation."""
        length_nm, salt_molar, charge_c_per_m2 = self.points[job]
        slab = Slab(length_nm, salt_molar, charge_c_per_m2)
        return Simulation(slab, self.settings, self.seed + job)


def spread(jobs: int, seed: int) -> tuple[tuple[float, ...], ...]:
    """Return points of a scrambled Sobol sequence, whose first points cover `RANGES` evenly."""
    engine = torch.quasirandom.SobolEngine(len(RANGES), scramble=True, seed=seed)
    low, high = torch.tensor(RANGES, dtype=torch.float64).T
    points = low + (high - low) * engine.draw(jobs, dtype=torch.float64)
    return tuple(tuple(row) for row in points.tolist())


class Bag:
    """A folder of simulations.

    Args:
        folder: Folder that `make_bag` has filled.
        clock: Returns seconds since 1970, the same for all workers.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder, self.clock = folder, clock
        try:
            plain = json.loads((folder / "design.json").read_text())
        except FileNotFoundError:
            raise SystemExit(
                f"{folder} is not a bag; create one with: python -m examples.ions.bag make {folder}"
            ) from None
        points = tuple(map(tuple, plain.pop("points")))
        self.design = Design(points, Settings(**plain.pop("settings")), **plain)

    def finished(self) -> list[int]:
        """Return the numbers of the simulations that have a result, in order."""
        return sorted(int(path.stem) for path in (self.folder / "results").glob("[0-9]*.pt"))

    def result(self, job: int) -> dict[str, Any]:
        """Return the point of a simulation and the fields of its `Profiles`, by name."""
        result: dict[str, Any] = read_whole(self._path("results", f"{job:05}.pt"))
        return result

    def claim(self, worker: str, choose: Choose = lambda _: 0) -> Claim | None:
        """Claim a simulation that no worker holds. Return ``None`` if all are held or finished.

        Args:
            worker: Name of the worker.
            choose: Chooses among the simulations that are free. The default takes the first.

        Raises:
            NewMachineBetter: ``choose`` takes none of them.
        """
        finished, newest = set(self.finished()), self._newest()
        free = [Claim(self, job, newest.get(job, 0) + 1) for job in range(len(self.design.points))]
        free = [claim for claim in free if claim.job not in finished and not claim.is_early()]
        while free:
            chosen = choose([claim.sweeps_left() for claim in free])
            if chosen is None:
                raise NewMachineBetter(f"of {worker}")
            claim = free.pop(chosen)
            # Otherwise, another worker was faster.
            if claim.take(worker) and not self._path("results", f"{claim.job:05}.pt").exists():
                return claim
        return None

    def status(self) -> dict[str, float]:
        """Return the progress of the bag.

        Returns:
            ``jobs``, and how many are ``finished``, ``running`` and ``waiting``. ``claims`` so far,
            and how many were ``taken_over`` after they expired, ``handed_back``, or ``resumed``
            from a saved state. ``lost_s``: seconds of work that was lost and repeated.
        """
        finished, newest = set(self.finished()), self._newest()
        held = [job for job, number in newest.items() if self._held(job, number)]
        running = len([job for job in held if job not in finished])
        notes = [self._note(job, n) for job, last in newest.items() for n in range(1, last + 1)]
        how = Counter(note["before"] for note in notes)
        return {
            "jobs": len(self.design.points),
            "finished": len(finished),
            "running": running,
            "waiting": len(self.design.points) - len(finished) - running,
            "claims": len(notes),
            "taken_over": how["silent"],
            "handed_back": how["handed back"],
            "resumed": sum(note["sweeps"] > 0 for note in notes),
            "lost_s": round(sum(note["lost_s"] for note in notes), 3),
        }

    def _path(self, kind: str, name: str) -> Path:
        return self.folder / kind / name

    def _newest(self) -> dict[int, int]:
        """Return the newest generation of each claimed simulation."""
        newest: dict[int, int] = {}
        for path in (self.folder / "claims").glob("[0-9]*.*"):
            job, _, generation = path.name.partition(".")
            newest[int(job)] = max(newest.get(int(job), 0), int(generation))
        return newest

    def _held(self, job: int, generation: int) -> bool:
        renewed_s = self._path("claims", f"{job:05}.{generation}").stat().st_mtime
        return self.clock() - renewed_s <= self.design.lease_s

    def _note(self, job: int, generation: int) -> dict[str, Any]:
        note: dict[str, Any] = json.loads(
            self._path("claims", f"{job:05}.{generation}").read_text()
        )
        return note


class Claim:
    """A worker's claim on a simulation; see `Bag.claim`."""

    def __init__(self, bag: Bag, job: int, generation: int) -> None:
        self.bag, self.job, self.generation = bag, job, generation
        self._path = bag._path("claims", f"{job:05}.{generation}")
        self._result = bag._path("results", f"{job:05}.pt")

    def is_early(self) -> bool:
        """Return whether a worker still holds the claim before this one."""
        return self.generation > 1 and self.bag._held(self.job, self.generation - 1)

    def sweeps_left(self) -> int:
        """Return the sweeps from the newest saved state to the end, at least 1."""
        settings, state = self.bag.design.settings, self.state() or {"sweeps": 0}
        return max(settings.equilibrate + settings.sweeps - int(state["sweeps"]), 1)

    def take(self, worker: str) -> bool:
        """Create the file of the claim. Return ``False`` if it exists."""
        now_s = self.bag.clock()
        note = {"worker": worker, "at_s": now_s, **self._before()}
        fresh = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.tmp")
        fresh.write_text(json.dumps(note))
        os.utime(fresh, (now_s, now_s))
        try:
            os.link(fresh, self._path)
        except FileExistsError:
            return False
        finally:
            fresh.unlink()
        return True

    def _before(self) -> dict[str, Any]:
        """Return how the previous claim ended and how much work was lost."""
        if self.generation == 1:
            return {"before": "", "lost_s": 0.0, "sweeps": 0}
        last = self.generation - 1
        renewed_s = self.bag._path("claims", f"{self.job:05}.{last}").stat().st_mtime
        state = self.state() or {"sweeps": 0, "saved_s": 0.0}
        if renewed_s == _RELEASED_S:
            return {"before": "handed back", "lost_s": 0.0, "sweeps": state["sweeps"]}
        kept_s = max(state["saved_s"], self.bag._note(self.job, last)["at_s"])
        lost_s = max(renewed_s - kept_s, 0.0)
        return {"before": "silent", "lost_s": lost_s, "sweeps": state["sweeps"]}

    def beat(self) -> None:
        """Renew the claim.

        Raises:
            ClaimLost: Another worker has claimed the simulation.
        """
        if self.bag._newest()[self.job] > self.generation:
            raise ClaimLost(f"another worker has claimed simulation {self.job}")
        os.utime(self._path, (self.bag.clock(),) * 2)

    def state(self) -> dict[str, Any] | None:
        """Return the newest saved state of this claim or an earlier one."""
        for generation in range(self.generation, 0, -1):
            path = self.bag._path("states", f"{self.job:05}.{generation}.pt")
            state: dict[str, Any] | None = read_if_there(path)
            if state is not None:
                return state
        return None

    def save(self, run: Simulation) -> None:
        """Save a state. Each claim has its own file, so an expired claim overwrites nothing."""
        path = self.bag._path("states", f"{self.job:05}.{self.generation}.pt")
        replace_whole(path, {**run.state_dict(), "saved_s": self.bag.clock()})

    def hand_back(self) -> None:
        """Release the claim, so that another worker can continue at once."""
        os.utime(self._path, (_RELEASED_S,) * 2)

    def finish(self, run: Simulation) -> bool:
        """Write the result. Return whether it is the first, which counts."""
        profiles = run.profiles()
        plain = {name: getattr(profiles, name) for name in profiles.__slots__}
        first = add_whole(self._result, {"point": self.bag.design.points[self.job], **plain})
        for path in (self.bag.folder / "states").glob(f"{self.job:05}.*.pt"):
            path.unlink(missing_ok=True)
        return first


def make_bag(folder: Path, design: Design) -> Bag:
    """Create a bag in a folder. An existing bag with the same design stays unchanged.

    Raises:
        SystemExit: The folder holds a bag with another design.
    """
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    text, path = json.dumps(asdict(design)), folder / "design.json"
    if path.exists() and path.read_text() != text:
        differs = _differences(json.loads(path.read_text()), json.loads(text))
        raise SystemExit(
            f"{folder} holds a bag with another design: {differs}; use its design or another folder"
        )
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text)
    fresh.replace(path)
    return Bag(folder)


def _differences(existing: dict[str, Any], requested: dict[str, Any]) -> str:
    """Describe in which settings two designs differ, or that only their points differ."""
    old, new = ({**d, **d["settings"], "jobs": len(d["points"])} for d in (existing, requested))
    differences = [
        f"{name} is {old.get(name)}, not {new.get(name)}"
        for name in sorted((old.keys() | new.keys()) - {"settings", "points"})
        if old.get(name) != new.get(name)
    ]
    return ", ".join(differences) or "its points differ"


class Machine:
    """The machine of a worker, which may be preempted.

    Args:
        lifetime: Of such machines.
        age_s: Its age now.
        clock: Returns seconds.
    """

    def __init__(self, lifetime: Lifetime, age_s: float, clock: Callable[[], float]) -> None:
        self._lifetime, self._clock, self._came_s = lifetime, clock, clock() - age_s
        self._sweep_s = 0.0  # unknown

    def choose(self, left: Sequence[int]) -> int | None:
        """Choose by the expected remaining life. The first simulation measures the speed."""
        if not self._sweep_s:
            return 0
        work_s = self._sweep_s * np.array(left, dtype=np.float64)
        return place(self._lifetime, self._clock() - self._came_s, work_s)

    def has_run(self, sweeps: int, took_s: float) -> None:
        """Note the speed of a simulation."""
        self._sweep_s = took_s / sweeps


def work(
    bag: Bag,
    worker: str,
    stopped: Callable[[], bool],
    wait: Callable[[float], object],
    machine: Machine | None = None,
) -> int:
    """Simulate until the bag is finished or `stopped` returns true.

    Args:
        bag: Bag to work on.
        worker: Name of this worker, stored in its claims.
        stopped: Returns whether to release the current claim and return.
        wait: Waits for a number of seconds, so that claims of other workers may expire.
        machine: Chooses simulations by its remaining life; by default, they are taken in order.

    Returns:
        Number of simulations that this worker finished.

    Raises:
        NewMachineBetter: The machine should be given back.
    """
    count = 0
    while not stopped():
        claim = bag.claim(worker, machine.choose) if machine else bag.claim(worker)
        if claim is not None:
            begun_s, sweeps = bag.clock(), claim.sweeps_left()
            count += (finished := simulate(claim, stopped))
            if machine and finished:
                machine.has_run(sweeps, bag.clock() - begun_s)
        elif len(bag.finished()) == len(bag.design.points):
            break
        else:
            wait(min(bag.design.lease_s / 4, 1.0))
    return count


def simulate(claim: Claim, stopped: Callable[[], bool]) -> bool:
    """Run a simulation to its end or until `stopped`. Return whether its result counts."""
    design = claim.bag.design
    run = design.simulation(claim.job)
    state = claim.state()
    if state is not None:
        run.load_state_dict(state)
    try:
        while not run.done:
            if stopped():
                claim.save(run)
                claim.hand_back()
                return False
            run.advance(design.beat_sweeps)
            claim.beat()
            if run.sweeps % design.save_sweeps < design.beat_sweeps:
                claim.save(run)
    except ClaimLost:
        return False
    return claim.finish(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("make", "work", "status"), help="action")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=64, help="number of simulations of a new bag")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sweeps", type=int, default=Settings().sweeps)
    parser.add_argument("--replicas", type=int, default=Settings().replicas)
    parser.add_argument(
        "--ions", type=int, default=Settings().ions, help="approximate ions per box"
    )
    parser.add_argument("--method", choices=METHODS, default=METHODS[0], help="of a new bag")
    parser.add_argument("--lease", type=float, default=30.0, help="of a new bag, in seconds")
    parser.add_argument("--recording", type=Path, help="of spot machines, to choose by their lives")
    parser.add_argument("--age", type=float, default=0.0, help="of this machine, in seconds")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.what == "make":
        settings = Settings(args.ions, args.replicas, sweeps=args.sweeps, method=args.method)
        points = spread(args.jobs, args.seed)
        make_bag(args.folder, Design(points, settings, args.seed, args.lease))
    elif args.what == "work":
        try:
            machine = _machine(args.recording, args.age) if args.recording else None
        except EvenstrideError as error:
            parser.error(str(error))
        if work_until_signal(Bag(args.folder), machine) == signal.SIGINT:
            raise SystemExit(128 + signal.SIGINT)
    status = Bag(args.folder).status()
    lines = (f"{name:12} {value:g}" for name, value in status.items())
    print(json.dumps(status) if args.json else "\n".join(lines))


def _machine(recording: Path, age_s: float) -> Machine:
    return Machine(recorded_transience(recording).lifetime, age_s, time.time)


def work_until_signal(bag: Bag, machine: Machine | None = None) -> int | None:
    """Work until the bag is finished or SIGTERM or SIGINT arrives. Return the signal, if any."""
    torch.set_num_threads(1)  # a worker uses one core; start more workers for more cores
    stop, received = threading.Event(), []

    def leave(number: int, _: object) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    try:
        work(bag, f"{socket.gethostname()}:{os.getpid()}", stop.is_set, stop.wait, machine)
    except NewMachineBetter:
        print("little life is left: give this machine back, and start a new one", file=sys.stderr)
    return received[0] if received else None


if __name__ == "__main__":
    main()
