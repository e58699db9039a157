"""Combine a workload, the offers and the wishes into a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import Any

from evenstride.core.gradients.noise_scale import Interval
from evenstride.errors import ConfigError
from evenstride.planner.search.branch_and_bound import SearchResult, Space, search
from evenstride.planner.search.full_search import full_search, gaps
from evenstride.planner.search.selection import ChosenCluster, NothingFits, Wishes, choose
from evenstride.planner.search.training_forecast import Kind, TrainingForecast, TrainingTask
from evenstride.planner.workload.workload_profile import MeasuredCluster

_TIMES = (0.25, 0.5, 1, 2, 4)


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of planning."""

    found: SearchResult
    chosen: ChosenCluster[TrainingForecast]
    wishes: Wishes
    caveats: tuple[str, ...]

    @property
    def gap(self) -> float:
        """Largest fraction by which a cluster that was not evaluated exactly could be better.

        Better means faster or cheaper, depending on the objective, within the limits. For the knee,
        it means both faster and cheaper than the shown clusters.
        """
        return self.found.gap

    def to_dict(self) -> dict[str, Any]:
        outlooks = self.found.outlooks
        rows = [row(one) for one in outlooks]
        return {
            "candidates": rows,
            "frontier": list(range(len(rows))),
            "chosen": outlooks.index(self.chosen.outlook),
            "reason": self.chosen.reason,
            "looked_at": self.found.looked_at,
            "judged": self.found.judged,
            "gap": self.gap if isfinite(self.gap) else None,
            "frontier_gap": self.found.front_gap,
            "caveats": list(self.caveats),
        }


def row(one: TrainingForecast) -> dict[str, Any]:
    choice = one.choice
    return {
        "cluster": choice.name,
        "place": choice.place,
        "nodes": choice.machines,
        "workers": choice.workers,
        "global_batch": choice.batch,
        **_ends("epochs", "", one.epochs),
        "shares": list(one.step.shares),
        "step_s": one.step.time_s,
        "communication_s": one.step.communication_s,
        **_ends("time", "s", one.time_s),
        **_ends("cost", "usd", one.cost_usd),
        "spot": choice.spot,
        "stretch": one.stretch,
    }


def _ends(name: str, unit: str, one: Interval) -> dict[str, float | None]:
    high = one.high if one.high < float("inf") else None
    of = f"_{unit}" if unit else ""
    return {f"{name}{of}": one.value, f"{name}_low{of}": one.low, f"{name}_high{of}": high}


def batches_about(base: int, task: TrainingTask, trained: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the batches to consider around a script's own, if their epochs are known.

    They include the batches that were trained, and the middle between each two of them.
    """
    known = sorted(set(trained))
    between = [round((a * b) ** 0.5) for a, b in pairwise(known)]
    about = {max(round(base * times), 1) for times in _TIMES}.union(known, between)
    return _possible(sorted(about), task)


def _possible(batches: Iterable[int], task: TrainingTask) -> tuple[int, ...]:
    known = (batch for batch in batches if batch <= task.samples)
    return tuple(batch for batch in known if task.epochs.at(batch) is not None)


def make_plan(
    kinds: Sequence[Kind],
    task: TrainingTask,
    wishes: Wishes,
    batches: Sequence[int],
    *,
    most_machines: int = 32,
    mixed: bool = True,
) -> Plan:
    """Return the plan for a workload."""
    if not kinds:
        raise ConfigError(
            "no machine is usable: those on offer were not measured and are not similar to a "
            "measured one; give the measured machine its name in the catalogue (evenstride "
            "profile --type), or give a --catalog that contains it"
        )
    known = _possible(batches, task)
    if not known:
        _require_enough_data(batches, task)
        raise ConfigError(
            f"the number of epochs is unknown for a batch of {', '.join(map(str, batches))}: "
            f"{task.epochs.why}; measure the gradient noise, or train with two batch sizes"
        )
    if most_machines < 1:
        raise ConfigError(f"invalid limit of {most_machines} machines: expected at least 1")
    found = search(Space(tuple(kinds), known, most_machines, mixed), task, wishes)
    if not found.outlooks:
        raise NothingFits(why_none(kinds, known, most_machines))
    chosen = choose(found.outlooks, wishes)
    caveats = (*_caveats(chosen.outlook, task, known), *_too_large(batches, task))
    return Plan(found, chosen, wishes, caveats)


def full_plan(
    kinds: Sequence[Kind],
    task: TrainingTask,
    wishes: Wishes,
    clusters: Sequence[MeasuredCluster],
) -> Plan:
    """Return the plan among the clusters that were trained, without interpolated step times."""
    found = full_search(kinds, task, clusters, wishes)
    missing = gaps(clusters)
    only = "only clusters and batches that were trained were compared, at their measured steps"
    caveats = (task.epochs.why, only, *([missing] if missing else []))
    return Plan(found, choose(found.outlooks, wishes), wishes, caveats)


def _require_enough_data(batches: Sequence[int], task: TrainingTask) -> None:
    if min(batches) > task.samples:
        raise ConfigError(
            f"a batch of {min(batches)} exceeds the {task.samples} samples of an epoch; give "
            f"--batches of at most {task.samples}"
        )


def _too_large(batches: Sequence[int], task: TrainingTask) -> list[str]:
    left_out = sorted(batch for batch in batches if batch > task.samples)
    if not left_out:
        return []
    return [
        f"batches larger than the {task.samples} samples of an epoch were left out: "
        f"{', '.join(map(str, left_out))}"
    ]


def _caveats(one: TrainingForecast, task: TrainingTask, batches: Sequence[int]) -> list[str]:
    sentences = [task.epochs.why]
    if task.links is None and one.choice.workers > 1:
        sentences.append(
            "links were not measured: the plan assumes 0.1 ms and 10 Gbit/s, and communication "
            f"takes {_percent(one.step.communication_s / one.step.time_s)} of a step"
        )
    shares = zip(one.choice.kinds, one.step.shares, strict=True)
    sentences += [
        f"a share of {share} samples on {kind.type} exceeds the largest that was measured, "
        f"{kind.curve.largest}"
        for kind, share in shares
        if share > kind.curve.largest > 0
    ]
    sentences += [
        f"steps on {kind.type} were not measured; the plan estimates them from those on "
        f"{kind.curve.source or 'another type'}"
        for kind in one.choice.kinds
        if not kind.curve.measured
    ]
    if len(batches) > 1 and one.choice.batch in (min(batches), max(batches)):
        sentences.append(
            f"the batch of {one.choice.batch} is at the end of the range that the plan considers; "
            "--batches sets another range"
        )
    return sentences


def _percent(part: float) -> str:
    return "under 0.1%" if part < 0.001 else f"{part:.1%}" if part < 0.1 else f"{part:.0%}"


MOST_MACHINES = 128
"""Largest number of machines for a plan (``--max-nodes``)."""


def why_none(kinds: Sequence[Kind], batches: Sequence[int], most_machines: int) -> str:
    """Return the requirement that no cluster meets, and how far to relax it, in one sentence.

    Memory and numbers of workers are compared with the batch that comes nearest to fitting.
    """
    smallest, largest = min(batches), max(batches)
    fewest = min(kinds, key=lambda kind: kind.workers)
    if fewest.workers > largest:
        return (
            f"a batch of {largest} has fewer samples than the {fewest.workers} workers of one "
            f"{fewest.name}, and each needs a sample; use a batch of at least {fewest.workers} "
            "(--batches), or types with fewer accelerators"
        )
    able = [kind for kind in kinds if kind.workers <= largest]
    if not any(k.workers <= b <= _room(k) * most_machines for k in able for b in batches):
        return _too_little_memory(able, smallest, most_machines)
    if any(kind.spot for kind in able):
        return (
            "on every cluster that can hold the batch, preemptions are so frequent that training "
            "may never end; plan without --spot, shorten --restart, or use types that are "
            "preempted less often"
        )
    return "no cluster can train this in a predictable time; use other types or other batches"


def _room(kind: Kind) -> float:
    return inf if kind.most_samples is None else kind.workers * kind.most_samples


def _too_little_memory(kinds: Sequence[Kind], batch: int, most_machines: int) -> str:
    roomiest = max(kinds, key=_room)
    room = int(_room(roomiest))
    needed = -(-batch // room)
    plural = "" if most_machines == 1 else "s"
    more = f"allow {needed} machines (--max-nodes {needed}), or " if needed <= MOST_MACHINES else ""
    return (
        f"memory is too small: the smallest batch, {batch}, needs {needed} machines of "
        f"{roomiest.name}, the largest type ({room} samples each), but the limit is "
        f"{most_machines} machine{plural}; {more}use a batch of at most {room * most_machines} "
        "(--batches), or types with more memory"
    )
