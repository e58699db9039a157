"""A whole bench: every part in turn, under one deadline."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from collections.abc import Callable, Iterator
from typing import Any

from evenstride.lab.doctor.bench.balance_bench import balance, overhead, timing
from evenstride.lab.doctor.bench.bench_budget import BenchBudget
from evenstride.lab.doctor.bench.bench_ranks import BenchRank, take_place
from evenstride.lab.doctor.bench.bench_training import RandomRows, choose_batch
from evenstride.lab.doctor.bench.exactness import exactness, wrong
from evenstride.lab.doctor.checkup import Findings, examine_rank


def run_bench(
    world_size: int, plan: BenchBudget, tell: Callable[[str], None]
) -> tuple[int, Findings]:
    """Return this process's rank, and what all have measured, the same everywhere; collective.

    Args:
        world_size: number of processes that the launcher has started.
        plan: how long each part may take.
        tell: called with what is being done, on rank 0 only.

    Returns:
        The findings are JSON types: ``ranks`` (as `examine_rank`), ``backend``,
        ``global_batch``, ``exactness``, ``timing`` and ``balance`` (``None`` for one process),
        ``overhead``, and ``wrong``, sentences about what is not as promised.

    Raises:
        ConfigError: the installed torch has no code for some rank's card.
    """
    with _deadline(plan.deadline_s), take_place(world_size, plan) as place:
        return place.rank, _measure(place, plan, tell if place.rank == 0 else _silent)


def _measure(place: BenchRank, plan: BenchBudget, tell: Callable[[str], None]) -> Findings:
    ranks = place.gathered(examine_rank(place.rank))
    tell("exactness: unequal shares against one process, float64 and float32")
    exact = exactness(place)
    data = RandomRows(choose_batch(place, plan), place.device)
    timed: list[dict[str, Any]] | None = None
    balanced: dict[str, Any] | None = None
    if place.world_size > 1:
        tell(f"timing: own work read against the truth, about {plan.timing_s:.0f} s")
        timed = timing(place, plan, data)
        tell(f"balance: equal and adaptive split in turns, about {plan.balance_s:.0f} s")
        balanced = balance(place, plan, data)
    tell(f"overhead: with and without evenstride in turns, about {plan.overhead_s:.0f} s")
    return {
        "ranks": ranks,
        "backend": place.backend,
        "global_batch": data.batch,
        "exactness": exact,
        "timing": timed,
        "balance": balanced,
        "overhead": overhead(place, plan, data),
        "wrong": wrong(exact),
    }


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """End the process with its stacks on stderr if the block takes too long, whatever hangs."""
    stderr = sys.__stderr__
    if stderr is None:  # nobody would see them
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _silent(_: str) -> None:
    """Say nothing: another rank does."""
