"""Measure the cost of reading the sample order at any position, compared with drawing all of it.

    python benchmarks/shuffle.py [--json]

For each length of a data set, the benchmark prints the time per index to read a batch and to read
many positions, and to find the positions of samples. It also prints the peak memory in addition to
input and result (`tracemalloc`). The reference is `numpy.random.RandomState.permutation`, which
must draw the whole order before the first sample. It runs up to a length of 10,000,000. Times are
those of the fastest call.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from evenstride.core.fleet import IntArray
from evenstride.core.sampling.permutation import SORTED_LENGTH, Permutation

LENGTHS = tuple(10**power for power in range(3, 13))
BATCH, MANY = 64, 65_536
LONGEST_WHOLE = 10**7
LEAST_CALLS, STRETCH_S = 3, 0.3


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one length.

    Args:
        length: Samples in the data set.
        network_runs: Largest average number of network runs per position; 0 if sorted.
        batch_s: Time per index to read `BATCH` positions.
        many_s: Time per index to read `MANY` positions.
        back_s: Time per index to find the positions of `MANY` samples.
        peak_bytes: Memory in addition to input and result, for `MANY` positions.
        whole_s: Time per index to draw the whole order with numpy; ``None`` if not measured.
        whole_bytes: Memory of that order; ``None`` if not measured.
    """

    length: int
    network_runs: float
    batch_s: float
    many_s: float
    back_s: float
    peak_bytes: int
    whole_s: float | None
    whole_bytes: int | None


def least_s(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of many calls, because disturbances only add time."""
    call()
    began_s, taken_s = time.perf_counter(), list[float]()
    while len(taken_s) < LEAST_CALLS or time.perf_counter() - began_s < STRETCH_S:
        started_s = time.perf_counter()
        call()
        taken_s.append(time.perf_counter() - started_s)
    return min(taken_s)


def peak_bytes(call: Callable[[], IntArray]) -> int:
    """Return the peak memory of a call, without its result."""
    tracemalloc.start()
    result = call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - result.nbytes


def measure(length: int) -> Result:
    """Measure one length of a data set."""
    shuffle = Permutation(length, seed=1, epoch=2)
    spread = np.linspace(0, length - 1, MANY).astype(np.int64)
    batch, samples = np.arange(BATCH, dtype=np.int64), shuffle.at(spread)
    sorted_as_whole = length <= SORTED_LENGTH
    high, low = shuffle.sides
    drawn = length <= LONGEST_WHOLE
    return Result(
        length=length,
        network_runs=0.0 if sorted_as_whole else high * low / length,
        batch_s=least_s(lambda: shuffle.at(batch)) / BATCH,
        many_s=least_s(lambda: shuffle.at(spread)) / MANY,
        back_s=least_s(lambda: shuffle.position_of(samples)) / MANY,
        peak_bytes=peak_bytes(lambda: shuffle.at(spread)),
        whole_s=least_s(lambda: whole(length)) / length if drawn else None,
        whole_bytes=whole(length).nbytes if drawn else None,
    )


def whole(length: int) -> IntArray:
    """Return a whole order drawn by numpy."""
    return np.random.RandomState([1, 0, 2]).permutation(length)


def report(result: Result) -> None:
    """Print one row of the table."""
    seconds = result.batch_s, result.many_s, result.back_s
    times = "".join(f"{1e9 * s:>10.0f}" for s in seconds)
    reference = "         -         -"
    if result.whole_s is not None and result.whole_bytes is not None:
        reference = f"{1e9 * result.whole_s:>10.0f}{result.whole_bytes / 1e3:>10,.0f}"
    runs = f"{result.network_runs:.5f}" if result.network_runs else "sorted"
    print(f"{result.length:>8.0e}{runs:>9}{times}{result.peak_bytes / 1e3:>10.0f}{reference}")


def main() -> None:
    """Measure all lengths and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    if not args.json:
        print(f"ns per index: {BATCH} and {MANY} positions, and back; kB in addition to the result")
        titles = "batch", "many", "back", "kB", "numpy ns", "numpy kB"
        print(f"{'length':>8}{'runs':>9}" + "".join(f"{title:>10}" for title in titles))
    results = []
    for length in LENGTHS:
        results.append(measure(length))
        if not args.json:
            report(results[-1])
    if args.json:
        machine = {"machine": platform.platform(), "numpy": np.__version__}
        print(json.dumps({**machine, "lengths": [asdict(r) for r in results]}, indent=1))


if __name__ == "__main__":
    main()
