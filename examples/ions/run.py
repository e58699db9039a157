"""Simulations on machines that come and go, and a network that learns from them meanwhile.

python -m examples.ions.run FOLDER --trace made
python -m examples.ions.run FOLDER --trace aws-08-03-2023/us-west-2c_v100_1 --tick 2

Workers of a bag simulate in some slots. What a trace says of spot machines happens to them, in
compressed time: a worker is killed (SIGKILL) when its machine went away, and a new one starts when
a machine came. Ranks under torchrun train the surrogate from the first simulations on. At the end
stand the counts, and the error on held-out simulations against the number of those trained.

Ctrl-C ends it, with all that it has started. The same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
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

from evenstride.errors import EvenstrideError
from evenstride.sim.scenario.recordings import SpotTrace, machines, spot_traces

ROOT = Path(__file__).resolve().parents[2]
_NOBODY = -1
_INTERRUPTED = 130  # exit code, as a shell has it
_GRACE_S = 40.0  # torchrun gives its ranks 30 s


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
    """Return the same of recorded spot machines; see `evenstride.sim.scenario.recordings`."""
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


def learning_curve(bag: Bag, steps: int, seed: int) -> list[dict[str, float | None]]:
    """Return the error on held-out simulations after training on the first ones of the design.

    It is ``None`` where none of those held out is finished.

    Args:
        bag: with everything finished.
        steps: of each training; in one process, each from a fresh network.
        seed: of the networks.
    """
    results = Results(bag)
    jobs = [job for job in bag.finished() if not is_held_out(job)]
    counts = sorted({*(n for n in (8, 16, 32, 64, 128, 256) if n < len(jobs)), len(jobs)})
    curve: list[dict[str, float | None]] = []
    for count in counts:
        torch.manual_seed(seed)
        net = surrogate(len(RANGES), bag.design.settings.bins)
        fit(*results.tensors(jobs[:count]), net, steps, 16, seed)
        curve.append({"simulations": count, "held_out": results.error(net)})
    return curve


def noise(bag: Bag) -> float | None:
    """Return the error that a perfect prediction would have: the held-out simulations' own.

    ``None`` if none of them is finished.
    """
    parts = []
    for job in filter(is_held_out, bag.finished()):
        result = bag.result(job)
        # Profiles are averaged with their mirror images.
        squares = result["error_molar"].square().mean(-1) / 2
        parts.append((squares.sqrt() / result["density_molar"].mean(-1)).mean())
    return float(torch.stack(parts).mean()) if parts else None


def start_process(*command: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=stdout,
        # So Ctrl-C is heard here alone, and `end_all` tells the others, once and in order: torchrun
        # leaves its ranks behind if a second signal comes while it ends them.
        start_new_session=True,
    )


def _worker(folder: Path) -> subprocess.Popen[bytes]:
    return start_process("examples.ions.bag", "work", str(folder), stdout=subprocess.DEVNULL)


def _kill(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()


def end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs: ranks save their state, workers hand back what they hold."""
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would leave some behind
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            _kill(process)
    signal.signal(signal.SIGINT, heard)


def run(bag: Bag, who: NDArray[np.int64], args: argparse.Namespace) -> dict[str, Any]:
    """Simulate and train until both are done; return the counts."""
    begun_s = time.monotonic()
    launcher = "evenstride.lab.processes.rendezvous"
    ranks = f"--nproc-per-node={args.ranks}"
    command = ("-m", "examples.ions.surrogate", str(bag.folder))
    after = f"--epochs-after={args.epochs_after}"
    training = start_process(launcher, ranks, *command, after, f"--seed={args.seed}")
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
        end_all([training, *(worker for _, worker in slots.here.values())])
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


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the description as it is written."""


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is asked for, and at least 1 is needed")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is asked for, and more than 0 is needed")
    return seconds


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.ions.run", description=__doc__, formatter_class=_Help
    )
    add = parser.add_argument
    add("folder", type=Path, help="simulations, states and weights; made anew, or gone on with")
    add("--jobs", type=_count, default=64, help="simulations; every eighth is held out")
    add("--ions", type=_count, default=60, help="about, in a box")
    add("--replicas", type=_count, default=16, help="of the box, simulated at once")
    add("--sweeps", type=_count, default=60, help="that are averaged, of each simulation")
    add("--trace", default="made", help="'made', or a recording's name")
    add("--from-tick", type=int, default=0, help="where the trace begins")
    add("--tick", type=_seconds, default=4.0, help="seconds from tick to tick")
    add("--slots", type=_count, default=2, help="for simulation workers")
    add("--ranks", type=_count, default=2, help="that train")
    add("--lease", type=_seconds, default=8.0, help="seconds without a sign until one is replaced")
    add("--epochs-after", type=int, default=500, help="over all simulations")
    add("--curve-steps", type=_count, default=4000, help="of each training at the end")
    add("--seed", type=int, default=0, help="of simulations, weights and made-up machines")
    add("--json", type=Path, default=argparse.SUPPRESS, help="write the counts here, too")
    return parser


def print_outcome(told: dict[str, Any]) -> None:
    """Print the counts and the curve; what cannot be judged is a dash."""
    for name, value in told.items():
        if name != "curve":
            print(f"{name:16} {'-' if value is None else format(value, 'g')}")
    for point in told["curve"]:
        error = "-" if point["held_out"] is None else f"{point['held_out']:.2%}"
        print(f"{point['simulations']:4.0f} simulations: {error} on those held out")


def _leave(number: int, _: object) -> None:
    sys.exit(f"ended by {signal.Signals(number).name}")  # with all it started


def _work(args: argparse.Namespace, who: NDArray[np.int64]) -> None:
    settings = Settings(args.ions, args.replicas, sweeps=args.sweeps)
    design = Design(spread(args.jobs, args.seed), settings, args.seed, args.lease)
    bag = make_bag(args.folder.resolve(), design)
    told = run(bag, np.roll(who, -args.from_tick, axis=0), args)
    told["noise"] = noise(bag)
    told["curve"] = learning_curve(bag, args.curve_steps, args.seed)
    print_outcome(told)
    if "json" in args:
        args.json.write_text(json.dumps(told, indent=1))


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    torch.set_num_threads(1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, _leave)
    made = args.trace == "made"
    try:
        who = made_up(args.slots, 1000, args.seed) if made else recorded(args.trace, args.slots)
    except EvenstrideError as error:
        parser.error(str(error))
    try:
        _work(args, who)
    except KeyboardInterrupt:
        ended = "interrupted; the same command goes on from here"
        print(f"{ended} (a traceback above is how torchrun ends)", file=sys.stderr)
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
