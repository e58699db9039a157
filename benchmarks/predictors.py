"""Compare predictors of a worker's next speed: NARX, RNN, LSTM, the last value, EMA and AR.

    python benchmarks/predictors.py [--seconds 120] [--keep FILE.npz] [--series FILE.npz]

Recorded series: Three processes with CPU limits of 0.7, 0.5 and 0.3 of a core repeat an iteration
of real work. The number of matrix products is in proportion to the limit. A fourth process
compiles, sorts, copies and multiplies in turns on the same cores. All begin an iteration together,
as in training, so their n-th speeds belong to the same moment. Each process records its speed. It
also records the machine's processor load and memory load before the iteration. The processor load
covers the last 0.3 s, about as long as an exchange in training.

Replayed series: CPU load of 16 PlanetLab machines, those with the largest variation of all that
were recorded on all three days. Samples are five minutes apart, with one sample per iteration, day
after day. The speed is the part of the machine that the load leaves free. The known load is that of
the sample before. The title has the factor by which time is compressed, if an iteration is as long
as a recorded one.

Predictions are one iteration ahead. Each network has two rows: one learns during the run, and the
other was fitted on *other* workers (all but one recorded worker, three quarters of the machines).
*step* is the time of a step with shares by the predicted speeds, divided by that with shares by the
true ones.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import numpy as np
import psutil

from evenstride.core.fleet import FloatArray
from evenstride.core.predictors import predictor_named
from evenstride.lab.processes.cpu_limits import open_limits

SPEEDS = (0.7, 0.5, 0.3)
# About 75 ms undisturbed: several periods of the CPU limits, so that these add little noise.
SIZE, PRODUCTS, BATCH = 192, 200, 256
LOAD_S = 0.3
PATIENCE_S = 60.0
SAMPLE_S = 300.0  # between samples of the PlanetLab recording
SIMPLE, NETWORKS = ("last", "ema", "ar"), ("narx", "rnn", "lstm")
WARM = 50  # first iterations, which are not evaluated


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Series of some workers.

    Args:
        seen: Speed, processor load and memory load, ``(workers, iterations, 3)``.
        step_s: Mean time between iterations in seconds.
    """

    seen: FloatArray
    step_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """Objects that the processes of a recording share."""

    seconds: float
    limited: Any  # barrier before the limits are set
    together: Any  # barrier before each iteration
    found: Any  # queue


class ProcessorLoad:
    """Load of all processors over the last `LOAD_S` or slightly longer.

    The kernel counts in hundredths of a second, so over a single iteration this is mostly noise.
    """

    def __init__(self) -> None:
        self._idle: deque[tuple[float, float]] = deque()
        self.now()

    def now(self) -> float:
        """Return the present load, 0 at the first call."""
        times, now_s = psutil.cpu_times(), time.perf_counter()
        self._idle.append((now_s, times.idle + getattr(times, "iowait", 0.0)))
        while len(self._idle) > 2 and now_s - self._idle[1][0] >= LOAD_S:
            self._idle.popleft()
        (from_s, idle_from_s), (to_s, idle_to_s) = self._idle[0], self._idle[-1]
        if to_s == from_s:
            return 0.0
        idle = float(idle_to_s - idle_from_s) / ((to_s - from_s) * (os.cpu_count() or 1))
        return min(max(1.0 - idle, 0.0), 1.0)


def work(worker: int, session: Session) -> None:
    """Repeat iterations with the others. Record speed, loads and start of each."""
    os.setpgrp()  # limits by signals stop whole process groups
    matrix = np.random.default_rng(0).standard_normal((SIZE, SIZE))
    load, noted = ProcessorLoad(), []
    session.limited.wait(PATIENCE_S)
    ends_s = time.perf_counter() + session.seconds
    while True:
        try:
            session.together.wait(PATIENCE_S)
        except BrokenBarrierError:  # another worker ended the recording
            break
        loads = load.now(), psutil.virtual_memory().percent / 100
        began_s = time.perf_counter()
        for _ in range(round(PRODUCTS * SPEEDS[worker])):
            matrix = np.tanh(matrix @ matrix / SIZE)
        ended_s = time.perf_counter()
        noted.append((BATCH * SPEEDS[worker] / (ended_s - began_s), *loads, began_s))
        if ended_s >= ends_s:
            session.together.abort()
    session.found.put((worker, np.array(noted)))


def disturb(seconds: float) -> None:
    """Load the machine in phases of one to four seconds, with pauses."""
    rng, ends_s = np.random.default_rng(1), time.perf_counter() + seconds
    kinds: tuple[Callable[[], object], ...] = (_compile, _sort, _copy, _multiply)
    while time.perf_counter() < ends_s:
        kind = kinds[rng.integers(len(kinds))]
        phase_ends_s = time.perf_counter() + rng.uniform(1, 4)
        while time.perf_counter() < phase_ends_s:
            kind()
        time.sleep(rng.uniform(0.5, 3))


def _compile() -> None:
    source = "\n".join(
        f"def f{n}(x):\n    return [x * {n} for _ in range({n})]" for n in range(200)
    )
    compile(source, "generated", "exec")


def _sort() -> None:
    sorted(np.random.default_rng(2).random(200_000).tolist())


def _copy() -> None:
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder) / "one"
        one.write_bytes(os.urandom(4_000_000))
        shutil.copy(one, Path(folder) / "two")


def _multiply() -> None:
    np.ones((400, 400)) @ np.ones((400, 400))


def record(seconds: float) -> Series:
    """Record limited workers on this machine while another process disturbs it."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    context, count = multiprocessing.get_context("spawn"), len(SPEEDS)
    session = Session(seconds, context.Barrier(count + 1), context.Barrier(count), context.Queue())
    workers = [context.Process(target=work, args=(k, session), daemon=True) for k in range(count)]
    disturber = context.Process(target=disturb, args=(seconds,), daemon=True)
    limits, caveat = open_limits(count)
    print(caveat or f"CPU limits: {limits.kind}")
    try:
        for process in workers:
            process.start()
        session.limited.wait(PATIENCE_S)
        disturber.start()
        for worker, process in enumerate(workers):
            assert process.pid is not None, "the process was started"
            limits.join(worker, process.pid)
            limits.set_speed(worker, SPEEDS[worker])
        found = dict(session.found.get(timeout=seconds + PATIENCE_S) for _ in workers)
    finally:
        limits.close()
    disturber.join()
    length = min(map(len, found.values()))
    noted = np.stack([found[worker][:length] for worker in range(count)])
    return Series(noted[:, :, :3], float(np.diff(noted[0, :, 3]).mean()))


def planetlab(machines: int = 16) -> FloatArray:
    """Return replayed series: speeds left by recorded loads, and the load of the previous sample.

    The days list different machines in different orders. Machines of all days are joined by name.
    The first sample of a day has no known load.
    """
    path = Path(os.environ.get("EVENSTRIDE_DATA") or "../shared/data") / "traces/planetlab-cpu.npz"
    try:
        with np.load(path) as file:
            days = [name.removeprefix("cpu_") for name in sorted(file) if name[:4] == "cpu_"]
            recorded = [dict(zip(file[f"vm_{d}"], file[f"cpu_{d}"], strict=True)) for d in days]
    except OSError:
        raise SystemExit(
            f"the recording of CPU loads {path} is missing; set EVENSTRIDE_DATA to the folder that "
            "holds traces/planetlab-cpu.npz"
        ) from None
    names = sorted(set.intersection(*map(set, recorded)))
    used = np.array([[day[name] for day in recorded] for name in names], np.float64) / 100
    moving = used.reshape(len(names), -1).std(axis=1).argsort()[::-1][:machines]
    load = used[moving]
    before = np.concatenate([np.full_like(load[:, :, :1], np.nan), load[:, :, :-1]], axis=2)
    speed = BATCH * np.maximum(1 - load, 0.1)
    seen = np.stack([speed, before, np.full_like(load, np.nan)], axis=3)
    return seen.reshape(len(load), -1, 3)


def predictions(name: str, series: FloatArray, taught: Any = None) -> FloatArray:
    """Return the speeds predicted one iteration ahead, ``(workers, iterations)``."""
    predictor: Any = predictor_named(name) if taught is None else taught
    workers = np.arange(len(series))
    state, predicted = predictor.start(len(series)), np.zeros(series.shape[:2])
    for step in range(series.shape[1]):
        speed, loads = series[:, step, 0], series[:, step, 1:].T
        predicted[:, step] = predictor.predict(state, loads)
        state = predictor.learn(state, workers, speed, loads)
    return predicted


def taught_on(name: str, series: FloatArray) -> Any:
    """Return a network that was fitted on some workers and no longer learns."""
    predictor: Any = predictor_named(name)
    workers, state = np.arange(len(series)), predictor.start(len(series))
    for _ in range(2):  # twice over the series
        for step in range(series.shape[1]):
            state = predictor.learn(state, workers, series[:, step, 0], series[:, step, 1:].T)
    return predictor.knowing(state, learns=False)


def held_out(name: str, series: FloatArray, folds: int = 4) -> FloatArray:
    """Return a network's predictions of each fold of the workers, fitted on all others."""
    workers, predicted = np.arange(len(series)), np.zeros(series.shape[:2])
    for mine in np.array_split(workers, min(folds, len(series))):
        others = np.setdiff1d(workers, mine)
        predicted[mine] = predictions(name, series[mine], taught_on(name, series[others]))
    return predicted


def judged(predicted: FloatArray, series: FloatArray) -> tuple[float, float]:
    """Return the relative RMSE, and the step time relative to that with true speeds."""
    true, predicted = series[:, WARM:, 0], predicted[:, WARM:]
    rmse = float(np.sqrt(np.mean((predicted / true - 1) ** 2)))
    shares = predicted / predicted.sum(axis=0)
    return rmse, float(((shares / true).max(axis=0) * true.sum(axis=0)).mean())


def table(title: str, series: FloatArray) -> Iterator[str]:
    """Yield the lines of the table of one series."""
    yield f"{title}: {series.shape[0]} workers, {series.shape[1]} iterations"
    rows = {name: predictions(name, series) for name in (*SIMPLE, *NETWORKS)}
    rows.update({f"{name}, others": held_out(name, series) for name in NETWORKS})
    for name, predicted in rows.items():
        rmse, step = judged(predicted, series)
        yield f"  {name:14} RMSE {rmse:7.2%}   step {step:.4f}"


def read(path: Path) -> Series:
    """Return stored series."""
    with np.load(path) as file:
        return Series(file["seen"], float(file["step_s"]))


def main() -> None:
    """Record or read the series, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--keep", type=Path, help="file for the recorded series")
    parser.add_argument("--series", type=Path, help="file of series to read instead of recording")
    args = parser.parse_args()
    replayed = planetlab()  # fails before the recording if the file is missing
    recorded = read(args.series) if args.series else record(args.seconds)
    if args.keep:
        np.savez_compressed(args.keep, seen=recorded.seen, step_s=recorded.step_s)
    if recorded.seen.shape[1] <= WARM:
        parser.error(
            f"too few iterations {recorded.seen.shape[1]}: expected more than {WARM}; increase "
            "--seconds"
        )
    title = f"recorded with disturbances, an iteration every {recorded.step_s * 1e3:.0f} ms"
    print("\n".join(table(title, recorded.seen)))
    faster = SAMPLE_S / recorded.step_s
    title = f"replayed PlanetLab CPU load, time compressed {faster:,.0f} times"
    print("\n".join(table(title, replayed)))


if __name__ == "__main__":
    main()
