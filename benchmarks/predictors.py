"""How well is a worker's next speed predicted: NARX beside the last value, EMA and AR.

    python benchmarks/predictors.py [--seconds 120] [--keep FILE.npz] [--series FILE.npz]

Recorded: two processes repeat one iteration of real work (matrix products) while a third one
compiles, sorts, copies and multiplies by turns on the same cores. At each iteration they note their
speed, and the machine's processor and memory load as known before it began. Replayed: CPU load
of PlanetLab machines (five-minute samples, one per iteration: a time compression of about 10,000),
where the speed is what the load leaves and the load known is that of the sample before.

Prediction is one iteration ahead. NARX is shown twice: learning as it runs, and fitted
beforehand on *other* workers than it is tested on. *step* is the time of a step whose shares
follow the predicted speeds, over that of the true ones.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from evenstride.core.fleet import FloatArray
from evenstride.core.predictors import predictor_named
from evenstride.core.predictors.narx import Narx

SIZE, PRODUCTS, BATCH = 192, 12, 256
WARM = 50  # iterations that are not judged


def work(seconds: float, series: Any) -> None:
    """Repeat an iteration and note (speed, processor load, memory load) before each."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((SIZE, SIZE))
    noted, ends_s = [], time.perf_counter() + seconds
    psutil.cpu_percent(None)
    while time.perf_counter() < ends_s:
        loads = psutil.cpu_percent(None) / 100, psutil.virtual_memory().percent / 100
        began_s = time.perf_counter()
        for _ in range(PRODUCTS):
            matrix = np.tanh(matrix @ matrix / SIZE)
        noted.append((BATCH / (time.perf_counter() - began_s), *loads))
    series.put(np.array(noted))


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


def record(seconds: float, workers: int = 2) -> FloatArray:
    """Return the series of all workers, ``(workers, iterations, 3)``, cut to one length."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    people = [context.Process(target=work, args=(seconds, queue)) for _ in range(workers)]
    people.append(context.Process(target=disturb, args=(seconds,)))
    for process in people:
        process.start()
    found = [queue.get() for _ in range(workers)]
    for process in people:
        process.join()
    length = min(map(len, found))
    return np.stack([series[:length] for series in found])


def planetlab(machines: int = 16) -> FloatArray:
    """Return replayed series: speeds left by recorded loads, with the load of the sample before."""
    path = Path(os.environ.get("EVENSTRIDE_DATA", "data")) / "traces" / "planetlab-cpu.npz"
    with np.load(path) as file:
        days = np.concatenate([file[name][:1000] for name in sorted(file) if name[:3] == "cpu"], 1)
    moving = np.argsort(days.std(axis=1))[::-1][:machines]
    load = days[moving].astype(np.float64) / 100
    speed = BATCH * np.maximum(1 - load, 0.1)
    before = np.concatenate([load[:, :1], load[:, :-1]], axis=1)
    return np.stack([speed, before, np.full_like(load, np.nan)], axis=2)


def predictions(name: str, series: FloatArray, taught: Any = None) -> FloatArray:
    """Return the speeds predicted one iteration ahead, ``(workers, iterations)``."""
    predictor: Any = predictor_named(name) if taught is None else taught
    workers = np.arange(len(series))
    state, told = predictor.start(len(series)), np.zeros(series.shape[:2])
    for step in range(series.shape[1]):
        speed, loads = series[:, step, 0], series[:, step, 1:].T
        told[:, step] = predictor.predict(state, loads)
        state = predictor.learn(state, workers, speed, loads)
    return told


def taught_on(series: FloatArray) -> Any:
    """Return a NARX that has been fitted on some workers and learns no more."""
    predictor: Any = Narx()
    workers, state = np.arange(len(series)), predictor.start(len(series))
    for _ in range(2):  # twice over the series
        for step in range(series.shape[1]):
            state = predictor.learn(state, workers, series[:, step, 0], series[:, step, 1:].T)
    return predictor.knowing(state, learns=False)


def held_out(series: FloatArray) -> FloatArray:
    """Return NARX's predictions of each half of the workers, fitted on the other half."""
    half = len(series) // 2
    one = predictions("narx", series[:half], taught_on(series[half:]))
    other = predictions("narx", series[half:], taught_on(series[:half]))
    return np.concatenate([one, other])


def judged(told: FloatArray, series: FloatArray) -> tuple[float, float]:
    """Return the relative RMSE, and the step time over that of true speeds."""
    true, told = series[:, WARM:, 0], told[:, WARM:]
    rmse = float(np.sqrt(np.mean((told / true - 1) ** 2)))
    shares = told / told.sum(axis=0)
    return rmse, float(((shares / true).max(axis=0) * true.sum(axis=0)).mean())


def table(title: str, series: FloatArray) -> Iterator[str]:
    """Yield the lines of one series' table."""
    yield f"{title}: {series.shape[0]} workers, {series.shape[1]} iterations"
    rows = {name: predictions(name, series) for name in ("last", "ema", "ar", "narx")}
    rows["narx, others'"] = held_out(series)
    for name, told in rows.items():
        rmse, step = judged(told, series)
        yield f"  {name:14} RMSE {rmse:7.2%}   step {step:.4f}"


def main() -> None:
    """Record (or read) the series, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--keep", type=Path, help="write the recorded series here")
    parser.add_argument("--series", type=Path, help="read series instead of recording them")
    asked = parser.parse_args()
    if asked.series:
        with np.load(asked.series) as file:
            recorded = file["series"]
    else:
        recorded = record(asked.seconds)
    if asked.keep:
        np.savez_compressed(asked.keep, series=recorded)
    print("\n".join(table("recorded under compile, sort, copy and matrix work", recorded)))
    print("\n".join(table("PlanetLab CPU load, replayed", planetlab())))


if __name__ == "__main__":
    main()
