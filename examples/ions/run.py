"""Simulations on machines that come and go, and a network that learns from them meanwhile.

python -m examples.ions.run FOLDER --trace made
python -m examples.ions.run FOLDER --trace aws-08-03-2023/us-west-2c_v100_1 --tick 2

Workers of a bag simulate in some slots. What a trace says of spot machines happens to them, in
compressed time: a worker is killed (SIGKILL) when its machine went away, and a new one starts when
a machine came. Ranks under torchrun train the surrogate from the first simulations on. At the end
stand the counts, and the error on held-out simulations against the number of those trained. Start
it again on the same folder, and it goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.ions.bag import RANGES, Bag, Design, make_bag, spread
from examples.ions.network import fit, surrogate
from examples.ions.simulate import Settings
from examples.ions.surrogate import Results, is_held_out
from numpy.typing import NDArray

from evenstride.sim.spot import SpotTrace, machines, spot_traces

ROOT = Path(__file__).resolve().parents[2]
_NOBODY = -1


def made_up(slots: int, ticks: int, seed: int) -> NDArray[np.int64]:
    """Return which machine is in each slot at each tick, ``(ticks, slots)``; -1 for none.

    Machines stay for 12 ticks and places stay empty for 4, on average, without memory.
    """
    random = np.random.default_rng(seed)
    traces = []
    for slot in range(slots):
        up: list[int] = []
        lengths = random.geometric
        while len(up) < ticks:
            up += [1] * int(lengths(1 / 12)) + [0] * int(lengths(1 / 4))
        traces.append(SpotTrace(f"made/{slot}", 1.0, np.array(up[:ticks], dtype=np.int64)))
    return machines(traces).who


def recorded(name: str, slots: int) -> NDArray[np.int64]:
    """Return the same of recorded spot machines; see `evenstride.sim.spot`."""
    who = machines(spot_traces(name)).who
    return who[:, :slots]


@dataclass(slots=True)
class Slots:
    """Workers in slots.

    Args:
        start: starts a worker and returns it.
        kill: ends one without notice.
    """

    start: Callable[[], Any]
    kill: Callable[[Any], None]
    here: dict[int, tuple[int, Any]] = field(default_factory=dict)
    started: int = 0
    killed: int = 0

    def apply(self, machines_there: list[int]) -> None:
        """Make the workers those of the machines that are there, one for each slot."""
        for slot, machine in enumerate(machines_there):
            before, worker = self.here.get(slot, (_NOBODY, None))
            if before == machine:
                continue
            if before != _NOBODY:
                self.kill(worker)
                self.killed += 1
                del self.here[slot]
            if machine != _NOBODY:
                self.here[slot] = machine, self.start()
                self.started += 1


def replay(
    who: NDArray[np.int64], slots: Slots, over: Callable[[], bool], wait: Callable[[], object]
) -> int:
    """Let a trace happen to workers, again and again, until it is over; return the ticks."""
    ticks = 0
    while not over():
        row = who[ticks % len(who)].tolist()
        turn = ticks // len(who) * (int(who.max()) + 1)  # another turn, other machines
        slots.apply([machine if machine == _NOBODY else machine + turn for machine in row])
        ticks += 1
        wait()
    return ticks


def learning_curve(bag: Bag, steps: int, seed: int) -> list[dict[str, float]]:
    """Return the error on held-out simulations after training on the first ones of the design.

    Args:
        bag: with everything finished.
        steps: of each training; in one process, each from a fresh network.
        seed: of the networks.
    """
    results = Results(bag)
    jobs = [job for job in bag.finished() if not is_held_out(job)]
    counts = sorted({*(n for n in (8, 16, 32, 64, 128, 256) if n < len(jobs)), len(jobs)})
    curve: list[dict[str, float]] = []
    for count in counts:
        torch.manual_seed(seed)
        net = surrogate(len(RANGES), bag.design.settings.bins)
        fit(*results.tensors(jobs[:count]), net, steps, 16, seed)
        curve.append({"simulations": count, "held_out": results.error(net) or float("nan")})
    return curve


def noise(bag: Bag) -> float:
    """Return the error that a perfect prediction would have: the held-out simulations' own."""
    parts = []
    for job in filter(is_held_out, bag.finished()):
        result = bag.result(job)
        # Profiles are averaged with their mirror images.
        squares = result["error_molar"].square().mean(-1) / 2
        parts.append((squares.sqrt() / result["density_molar"].mean(-1)).mean())
    return float(torch.stack(parts).mean()) if parts else float("nan")


def _start(*command: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, env=environment)


def _worker(folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "examples.ions.bag", "work", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def _kill(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()


def run(bag: Bag, who: NDArray[np.int64], args: argparse.Namespace) -> dict[str, Any]:
    """Simulate and train until both are done; return the counts."""
    begun_s = time.monotonic()
    launcher = ("torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    ranks = f"--nproc-per-node={args.ranks}"
    command = ("-m", "examples.ions.surrogate", str(bag.folder))
    after = f"--epochs-after={args.epochs_after}"
    training = _start(*launcher, ranks, *command, after, f"--seed={args.seed}")
    slots = Slots(lambda: _worker(bag.folder), _kill)
    try:
        ticks = replay(
            who,
            slots,
            lambda: _over(bag, slots, training),
            lambda: time.sleep(args.tick),
        )
        simulated_s = time.monotonic() - begun_s
        for _, worker in slots.here.values():
            worker.wait()
        code = training.wait()
    finally:
        training.terminate()
        for _, worker in slots.here.values():
            _kill(worker)
    return {
        **bag.status(),
        "ticks": ticks,
        "workers_started": slots.started,
        "workers_killed": slots.killed,
        "simulated_s": round(simulated_s, 1),
        "took_s": round(time.monotonic() - begun_s, 1),
        "training_exit": code,
    }


def _over(bag: Bag, slots: Slots, training: subprocess.Popen[bytes]) -> bool:
    """Return whether everything is simulated, and say how far it is."""
    if training.poll():
        raise SystemExit(f"training ended with code {training.returncode}; see its lines above")
    finished, jobs = len(bag.finished()), len(bag.design.points)
    told = f"{finished}/{jobs} simulations; {len(slots.here)} workers, {slots.killed} killed so far"
    print(told, flush=True)
    return finished == jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--ions", type=int, default=60, help="about, in a box")
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--sweeps", type=int, default=60)
    parser.add_argument("--trace", default="made", help="'made', or a recording's name")
    parser.add_argument("--from-tick", type=int, default=0, help="where the trace begins")
    parser.add_argument("--tick", type=float, default=4.0, help="seconds from tick to tick")
    parser.add_argument("--slots", type=int, default=2, help="for simulation workers")
    parser.add_argument("--ranks", type=int, default=2, help="that train")
    parser.add_argument("--lease", type=float, default=8.0, help="seconds")
    parser.add_argument("--epochs-after", type=int, default=500, help="over all simulations")
    parser.add_argument("--curve-steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the counts here, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(args.ions, args.replicas, sweeps=args.sweeps)
    design = Design(spread(args.jobs, args.seed), settings, args.seed, args.lease)
    bag = make_bag(args.folder.resolve(), design)
    made = args.trace == "made"
    who = made_up(args.slots, 1000, args.seed) if made else recorded(args.trace, args.slots)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # with all it started
    told = run(bag, np.roll(who, -args.from_tick, axis=0), args)
    told["noise"] = noise(bag)
    told["curve"] = learning_curve(bag, args.curve_steps, args.seed)
    for name, value in told.items():
        if name != "curve":
            print(f"{name:16} {value:g}")
    for point in told["curve"]:
        print(f"{point['simulations']:4.0f} simulations: {point['held_out']:.2%} on those held out")
    if args.json:
        args.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
