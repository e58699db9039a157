"""The most important facts about one or several runs, in at most three short sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from evenstride.core.allocation.speedup import WORTH_IT
from evenstride.core.formatting import signed_part
from evenstride.report.analysis.attribution import Study, Totals, slowed_of
from evenstride.report.wording import duration

ALIKE = 0.005
"""Speed-ups that differ by less count as equal."""
_MOST = 3
_DATA = 0.5  # fraction of the busy time
_LONGER = 0.02  # smaller excesses over the slowest other worker are random variation
_FACTOR = 1.1  # smaller ratios are printed in percent


def key_findings(
    study: Study | None, totals: Totals, sync: str, ranks: Sequence[int]
) -> tuple[str, ...]:
    """Return what the split gains, which worker is the slowest, and what else matters most.

    Args:
        study: The latest generation with steps; ``None`` without one.
        totals: Sums over the run.
        sync: The synchronisation mode.
        ranks: The workers whose speeds are examined, at about 20 ms each.
    """
    if study is None:
        return ("No step is recorded yet.",)
    if why := study.generation.not_measured:
        return (f"The steps were not measured: {why}.",)
    return tuple(islice(_findings(study, totals, sync, ranks), _MOST))


def _findings(study: Study, totals: Totals, sync: str, ranks: Sequence[int]) -> Iterator[str]:
    together = study.generation.lockstep and len(study.generation.workers) > 1
    if not study.generation.lockstep:
        yield f"In the mode {sync}, workers do not wait for each other, so there is no speed-up."
    elif not together:
        yield "The run has one worker, so there is nothing to balance."
    else:
        yield _gain(totals)
        yield _slowest(study)
    for one in slowed_of(study, ranks):
        yield f"Worker {one.rank} ran {one.worst}."
    if together:
        yield f"The workers waited for slower ones in {totals.waiting_part:.0%} of their time."


def _gain(totals: Totals) -> str:
    """Return how long steps take, and how long with the equal or the best split."""
    speedup, bound = totals.speedup_model, totals.bound_model
    if speedup is None or bound is None:
        each_s = totals.took_s / totals.steps if totals.steps else None
        return f"Steps take {duration(each_s)}; the times of other splits are not known yet."
    step, equal, best = (
        duration(sum_s / totals.judged_steps)
        for sum_s in (totals.judged_s, totals.equal_s, totals.best_s)
    )
    if speedup < 1.0 - ALIKE:
        return f"Steps take {step}, longer than with the equal split, which would take {equal}."
    if bound - 1.0 < WORTH_IT:
        return f"Balancing cannot help much: the best split is {signed_part(bound - 1)} than equal."
    if speedup <= 1.0 + ALIKE:
        return f"Equal steps take {step}; balanced steps would take {best}."
    return f"Balanced steps take {step}; equal steps would take {equal}."


def _slowest(study: Study) -> str:
    """Return which worker made the others wait most, and by how much it is slower."""
    blame = study.blames[0]
    if not blame.stretches:
        return "No worker made the others wait for 2% of the time or more."
    main = blame.stretches[0]
    if main.data_part >= _DATA:
        return (
            f"Worker {blame.rank} is the slowest: it waits for data in {main.data_part:.0%} of its "
            "busy time."
        )
    if main.longer < _LONGER:
        return (
            f"Worker {blame.rank} made the others wait {blame.part:.0%} of the time, by random "
            "variation of its step times."
        )
    ratio = 1.0 + main.longer
    much = f"{ratio:.1f} times as long as" if ratio >= _FACTOR else f"{main.longer:.0%} longer than"
    return f"Worker {blame.rank} is the slowest: its steps take {much} any other worker's."


def compared_findings(runs: Sequence[tuple[str, Totals, Sequence[str]]]) -> tuple[str, ...]:
    """Return how runs compare by samples per second, and the slowest worker in the first ones.

    Args:
        runs: The name, the sums and the key findings of each run, in order.
    """
    rates = {name: totals.samples_per_s for name, totals, _ in runs}
    known = {name: rate for name, rate in rates.items() if rate}
    if len(known) < 2:
        return ("Fewer than two of the runs have recorded steps.",)
    best = max(known, key=lambda name: known[name])
    first = next(name for name in known if name != best)
    compared = (
        f"{best} trains {known[best] / known[first]:.2f} times as many samples per second as "
        f"{first}."
    )
    slowest = [f"{name}: {found[1]}" for name, _, found in runs if len(found) > 1]
    return (compared, *slowest)[:_MOST]
