"""Simulate on preemptible machines, and train a network on the results at the same time.

    python -m examples.ions.run FOLDER --trace made
    python -m examples.ions.run FOLDER --trace aws-08-03-2023/us-west-2c_v100_1 --tick 2

Each slot runs one simulation worker of a bag. The command replays a trace of spot machines in
compressed time. It kills a worker (SIGKILL) when its machine is preempted, and starts a new one
when a machine arrives. Ranks under torchrun train the surrogate as soon as the first simulations
are finished. At the end, the command prints counts, and the held-out error by number of trained
simulations.

Ctrl-C ends the command and all processes that it started. The same command continues from there.
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
from examples.ions.simulate import METHODS, Settings
from examples.ions.surrogate import Results, is_held_out
from numpy.typing import NDArray

from evenstride.errors import EvenstrideError
from evenstride.planner.spot_recordings import recorded_transience
from evenstride.sim.scenario.recordings import SpotTrace, machines, spot_traces

ROOT = Path(__file__).resolve().parents[2]
_EMPTY = -1  # a slot without a machine
_INTERRUPTED = 130  # exit code after Ctrl-C, as in a shell
_GRACE_S = 40.0  # torchrun gives its ranks 30 s


def made_up(slots: int, ticks: int, seed: int) -> NDArray[np.int64]:
    """Return a random trace: the machine in each slot at each tick, ``(ticks, slots)``.

    -1 is an empty slot. Machines stay for 12 ticks and slots stay empty for 4 ticks on average.
    Both times are geometrically distributed.
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
    """Return a recorded trace in the same form; see `evenstride.sim.scenario.recordings`."""
    who = machines(spot_traces(name)).who
    return who[:, :slots]


@dataclass(slots=True)
class Slots:
    """Slots with at most one worker each.

    Args:
        start: Starts a worker and returns it.
        kill: Kills a worker without notice.
    """

    start: Callable[[], Any]
    kill: Callable[[Any], None]
    here: dict[int, tuple[int, Any]] = field(default_factory=dict)
    started: int = 0
    killed: int = 0

    def apply(self, present: list[int]) -> None:
        """Start and kill workers so that each present machine, one per slot, has its worker."""
        for slot, machine in enumerate(present):
            before, worker = self.here.get(slot, (_EMPTY, None))
            if before == machine:
                continue
            if before != _EMPTY:
                self.kill(worker)
                self.killed += 1
                del self.here[slot]
            if machine != _EMPTY:
                self.here[slot] = machine, self.start()
                self.started += 1


def replay(
    who: NDArray[np.int64], slots: Slots, over: Callable[[], bool], wait: Callable[[], object]
) -> int:
    """Replay a trace repeatedly until `over` returns true. Return the number of ticks."""
    ticks = 0
    while not over():
        row = who[ticks % len(who)].tolist()
        offset = ticks // len(who) * (int(who.max()) + 1)  # each repetition has other machines
        slots.apply([machine if machine == _EMPTY else machine + offset for machine in row])
        ticks += 1
        wait()
    return ticks


def learning_curve(bag: Bag, steps: int, seed: int) -> list[dict[str, float | None]]:
    """Return the held-out error after training on the first 8, 16, ... simulations of the design.

    Each training starts from a new network, in one process. The error is ``None`` if no held-out
    simulation is finished.

    Args:
        bag: Bag whose simulations are finished.
        steps: Optimizer steps of each training.
        seed: Seed of the networks.
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
    """Return the error of a perfect prediction, which is the noise of the held-out simulations.

    ``None`` if no held-out simulation is finished.
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
        # Only this process receives Ctrl-C, and `end_all` ends the others once and in order.
        # torchrun leaves its ranks running if a second signal arrives while it ends them.
        start_new_session=True,
    )


def start_worker(folder: Path, recording: Path | None) -> subprocess.Popen[bytes]:
    placed = ("--recording", str(recording)) if recording else ()
    command = ("examples.ions.bag", "work", str(folder), *placed)
    return start_process(*command, stdout=subprocess.DEVNULL)


def write_recording(who: NDArray[np.int64], tick_s: float, path: Path) -> Path:
    """Write the second half of a trace, which is replayed last, as a recording of machines.

    Raises:
        ConfigError: No machine was preempted in it.
    """
    up = (who[len(who) // 2 :] >= 0).sum(axis=1)
    rows = (f"{tick * tick_s:.6f},{count}" for tick, count in enumerate(up.tolist()))
    path.write_text("\n".join(("at_s,up", *rows)))
    recorded_transience(path)
    return path


def _kill(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()


def end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """End all running processes. Ranks save their state and workers release their claims."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would leave some running
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            _kill(process)
    signal.signal(signal.SIGINT, before)


def run(bag: Bag, who: NDArray[np.int64], args: argparse.Namespace) -> dict[str, Any]:
    """Simulate and train until both are done. Return the counts."""
    path = bag.folder / "machines.csv"
    recording = write_recording(who, args.tick, path) if args.placed else None
    begun_s = time.monotonic()
    launcher = "evenstride.lab.processes.rendezvous"
    ranks = f"--nproc-per-node={args.ranks}"
    command = ("-m", "examples.ions.surrogate", str(bag.folder))
    after = f"--epochs-after={args.epochs_after}"
    training = start_process(launcher, ranks, *command, after, f"--seed={args.seed}")
    slots = Slots(lambda: start_worker(bag.folder, recording), _kill)
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
    """Print the progress, and return whether all simulations are finished."""
    if training.poll():
        raise SystemExit(f"training ended with exit code {training.returncode}; see its log above")
    finished, jobs = len(bag.finished()), len(bag.design.points)
    workers = f"{len(slots.here)} workers, {slots.killed} killed so far"
    print(f"{finished}/{jobs} simulations; {workers}", flush=True)
    return finished == jobs


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows default values, and the description without wrapping."""


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"invalid value {text}: expected an integer of at least 1")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"invalid value {text}: expected more than 0 seconds")
    return seconds


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.ions.run", description=__doc__, formatter_class=_Help
    )
    add = parser.add_argument
    add("folder", type=Path, help="of simulations, states and weights; new, or to continue")
    add("--jobs", type=_count, default=64, help="simulations; every eighth is held out")
    add("--ions", type=_count, default=60, help="approximate ions per box")
    add("--replicas", type=_count, default=16, help="boxes that are simulated in parallel")
    add("--sweeps", type=_count, default=60, help="sweeps that each simulation averages")
    add("--method", choices=METHODS, default=METHODS[0], help="of the simulations")
    add("--trace", default="made", help="'made' (random), or the name of a recording")
    add("--from-tick", type=int, default=0, help="first tick of the trace")
    add("--tick", type=_seconds, default=4.0, help="seconds per tick")
    add("--slots", type=_count, default=2, help="slots for simulation workers")
    add("--placed", action="store_true", help="workers choose by the life left of their machine")
    add("--ranks", type=_count, default=2, help="ranks that train")
    add("--lease", type=_seconds, default=8.0, help="seconds after which a silent worker is lost")
    add("--epochs-after", type=int, default=500, help="epochs over all simulations")
    add("--curve-steps", type=_count, default=4000, help="steps of each training at the end")
    add("--seed", type=int, default=0, help="of simulations, weights and the random trace")
    add("--json", type=Path, default=argparse.SUPPRESS, help="file to write the counts to")
    return parser


def print_outcome(outcome: dict[str, Any]) -> None:
    """Print the counts and the curve. A dash stands for an unknown value."""
    for name, value in outcome.items():
        if name != "curve":
            print(f"{name:16} {'-' if value is None else format(value, 'g')}")
    for point in outcome["curve"]:
        error = "-" if point["held_out"] is None else f"{point['held_out']:.2%}"
        print(f"{point['simulations']:4.0f} simulations: held-out error {error}")


def _leave(number: int, _: object) -> None:
    sys.exit(f"ended by {signal.Signals(number).name}")  # `run` then ends all processes


def _work(args: argparse.Namespace, who: NDArray[np.int64]) -> None:
    settings = Settings(args.ions, args.replicas, sweeps=args.sweeps, method=args.method)
    design = Design(spread(args.jobs, args.seed), settings, args.seed, args.lease)
    bag = make_bag(args.folder.resolve(), design)
    outcome = run(bag, np.roll(who, -args.from_tick, axis=0), args)
    outcome["noise"] = noise(bag)
    outcome["curve"] = learning_curve(bag, args.curve_steps, args.seed)
    print_outcome(outcome)
    if "json" in args:
        args.json.write_text(json.dumps(outcome, indent=1))


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    torch.set_num_threads(1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _leave)
    made = args.trace == "made"
    try:
        who = made_up(args.slots, 1000, args.seed) if made else recorded(args.trace, args.slots)
    except EvenstrideError as error:
        parser.error(str(error))
    try:
        _work(args, who)
    except EvenstrideError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        ended = "interrupted; run the same command again to continue"
        print(f"{ended} (torchrun may have printed a traceback above)", file=sys.stderr)
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
