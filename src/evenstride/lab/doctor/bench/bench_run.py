"""A bench: exactness, timing, what balancing brings, and what it costs, under one deadline."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from evenstride.core.allocation.proportional_split import apportion
from evenstride.lab.doctor.bench.bench_ranks import BenchBudget, BenchRank, take_place
from evenstride.lab.doctor.bench.bench_training import BenchArm, RandomRows, choose_batch, in_turns
from evenstride.lab.doctor.bench.exactness import exactness, wrong
from evenstride.lab.doctor.checkup import Findings, examine_rank
from evenstride.trace.read import TRACE_NAME
from evenstride.trace.run_log import RunLog

_RESAMPLES = 4_000
_UNDER = 0.01  # what overhead should stay under


def run_bench(
    world_size: int, plan: BenchBudget, tell: Callable[[str], None]
) -> tuple[int, Findings]:
    """Return this process's rank, and what all have measured, the same everywhere; collective.

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


def timing(place: BenchRank, plan: BenchBudget, data: RandomRows) -> list[dict[str, Any]]:
    """Return for each rank its own work as evenstride reads it, and as it is; collective.

    With unequal shares, so that ranks wait for each other. The truth is of the very same steps,
    timed by other means; see `BenchArm.timed_steps`. All figures are medians over the reported
    steps; those read are ``None`` where none was.
    """
    weights = np.array([1.0 + rank % 3 for rank in range(place.world_size)])
    most = np.full_like(weights, data.batch)
    shares = apportion(weights, data.batch, np.ones_like(weights), most)
    policy = "static:" + ",".join(str(int(share)) for share in shares)
    with tempfile.TemporaryDirectory(prefix="evenstride-bench-") as folder:
        trace = Path(folder) / TRACE_NAME if place.rank == 0 else None
        arm = BenchArm(place, data, policy, trace)
        times_s = arm.timed_steps(plan.block_steps)
        for _ in in_turns(place, plan.timing_s, 1):
            times_s += arm.timed_steps(plan.block_steps)
        arm.close()
        all_times_s = place.gathered(times_s)
        figures = (
            [
                {"share": int(share), **compared(mine, read_s, plan.block_steps)}
                for share, mine, read_s in zip(
                    shares, all_times_s, _read_s(trace, place.world_size), strict=True
                )
            ]
            if trace
            else []
        )
    return place.agreed(figures)


def compared(
    times_s: Sequence[tuple[float, float]], read_s: Mapping[int, float], cold_steps: int
) -> dict[str, float | None]:
    """Return medians of what was read beside the truth, and of their ratio step by step.

    All are over the steps that were read; without any the truth is over all warm ones.
    """
    steps = [step for step in read_s if cold_steps <= step < len(times_s)]
    warm = [times_s[step] for step in steps] or times_s[cold_steps:]
    return {
        "true_s": median(own_s for own_s, _ in warm),
        "step_s": median(whole_s for _, whole_s in warm),
        "read_s": median(read_s[step] for step in steps) if steps else None,
        "ratio": median(read_s[step] / times_s[step][0] for step in steps) if steps else None,
    }


def _read_s(trace: Path, workers: int) -> list[dict[int, float]]:
    busy_s: list[dict[int, float]] = [{} for _ in range(workers)]
    for seen in RunLog(trace).observations:
        if seen.modelled:
            busy_s[seen.worker] |= dict(enumerate(seen.busy_s, start=seen.first_step))
    return busy_s


def balance(place: BenchRank, plan: BenchBudget, data: RandomRows) -> dict[str, Any]:
    """Return what a step takes with the equal and with the adaptive split; collective."""
    arms = [BenchArm(place, data, policy) for policy in ("uniform", "adaptive")]
    for arm in arms:  # the opening, in which the first splits are tried
        arm.block(2 * plan.block_steps)
    times_s = _blocks(place, plan.balance_s, arms, plan.block_steps)
    stride = arms[1].stride
    assert stride is not None, "both arms have a policy"
    summary, shares = stride.summary(), list(stride.shares)
    for arm in arms:
        arm.close()
    ratios = [equal / adaptive for equal, adaptive in zip(*times_s, strict=True)]
    figures = {
        "global_batch": data.batch,
        "equal_s": median(times_s[0]),
        "adaptive_s": median(times_s[1]),
        "speedup": median(ratios),
        "speedup_interval": median_interval(ratios),
        "bound_model": summary.bound_model,
        "shares": shares,
        "changes": summary.changes,
        "blocks": len(ratios),
    }
    return place.agreed(figures)


def overhead(place: BenchRank, plan: BenchBudget, data: RandomRows) -> dict[str, Any]:
    """Return what a step takes with evenstride's equal split and without it; collective.

    Plain training is run twice, the second time as a control (A/A): what its ratio is off 1 is
    what this machine cannot tell.
    """
    arms = [BenchArm(place, data, policy) for policy in (None, "uniform", None)]
    for arm in arms:
        arm.block(2 * plan.block_steps)
    own_before_s, steps_before = arms[1].own_s()
    plain_s, with_s, again_s = _blocks(place, plan.overhead_s, arms, plan.block_steps)
    own_after_s, steps_after = arms[1].own_s()
    for arm in arms:
        arm.close()
    ratios = [b / a for a, b in zip(plain_s, with_s, strict=True)]
    controls = [b / a for a, b in zip(plain_s, again_s, strict=True)]
    high = median_interval(ratios)[1]
    figures = {
        "plain_s": median(plain_s),
        "evenstride_s": median(with_s),
        "ratio": median(ratios),
        "ratio_interval": median_interval(ratios),
        "control": median(controls),
        "control_interval": median_interval(controls),
        "pairs": len(ratios),
        "verdict": "met" if high - median(controls) < _UNDER else "unresolved",
    }
    own_s = (own_after_s - own_before_s) / (steps_after - steps_before)
    return {**place.agreed(figures), "own_s": max(place.gathered(own_s))}


def _blocks(
    place: BenchRank, seconds: float, arms: Sequence[BenchArm], steps: int
) -> list[list[float]]:
    times_s: list[list[float]] = [[] for _ in arms]
    for order in in_turns(place, seconds, len(arms)):
        for number in order:
            times_s[number].append(arms[number].block(steps))
    return times_s


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by resampling; the same for the same values.

    Source:
        The percentile bootstrap (Efron, Annals of Statistics 1979).
    """
    known = np.array(values)
    rng = np.random.default_rng(0)
    medians = np.median(known[rng.integers(0, len(known), (_RESAMPLES, len(known)))], axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)
