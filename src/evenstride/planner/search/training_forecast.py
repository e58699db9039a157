"""What a cluster would take for a whole training, and between what that may lie.

`Kind` is a type of machine to rent, `ClusterChoice` a number of each, `outlook` what it comes to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, hypot, inf, log

from evenstride.core.gradients.noise_scale import Z95, Interval
from evenstride.planner.spot_losses import PreemptionRate, SaveCosts, slowdown
from evenstride.planner.workload.epochs_to_target import Epochs
from evenstride.planner.workload.step_time import (
    Curve,
    Reduces,
    StepEstimate,
    Workers,
    exact_step,
)
from evenstride.planner.workload.workload_profile import Links
from evenstride.sim.engine.network import ParameterServers, Ring

UNKNOWN_LINKS = 0.5
"""By which an assumed link may be off, in the logarithm: a factor of 2.7 (95 %)."""

USUAL_SAVES = SaveCosts(save_s=2.0, restart_s=(120.0,))
"""Assumed where nothing is known: how long one waits for another machine differs most."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One type of machine in one place, on demand or as spot."""

    type: str  # as the catalogue names it
    # Cloud, region and zone, between which links are known; machines of one cluster are in one
    # place
    place: str
    workers: int  # of a machine, at least 1: its accelerators, or one
    curve: Curve  # of one worker
    usd_per_h: Interval  # price of a machine
    most_samples: int | None = None  # that fit into a worker's memory; ``None`` for no limit
    transience: PreemptionRate | None = None  # how soon machines are taken away; ``None`` on demand
    # Of a machine, such as ``T4:2``; empty without any, or with a part of one
    accelerators: str = ""
    told_apart: bool = False  # whether the name needs them: the type is on offer with others, too

    @property
    def spot(self) -> bool:
        return self.transience is not None

    @property
    def name(self) -> str:
        """Its type, with its accelerators where needed, and whether it is spot."""
        own = f"{self.type}+{self.accelerators or 'none'}" if self.told_apart else self.type
        return f"{own} spot" if self.spot else own

    def machines(self, count: int) -> Workers:
        return Workers(self.curve, count * self.workers, self.most_samples)


def by_place(kinds: Iterable[Kind]) -> dict[str, list[Kind]]:
    found: dict[str, list[Kind]] = {}
    for kind in kinds:
        found.setdefault(kind.place, []).append(kind)
    return found


def undominated(kinds: Sequence[Kind], *, ends: bool = False) -> list[Kind]:
    """Return the kinds of a place without those that another one beats in everything.

    Beaten is who has as many workers, on demand or spot alike, and is neither quicker, nor cheaper,
    nor larger, nor longer there. Putting the better kind in its place, machine by machine, makes no
    cluster slower or dearer, but for rounding of shares; so no best cluster is lost. Of equals, the
    first by name stays. Takes ``O(n log n + n * kept)``.
    """
    kept: list[Kind] = []
    for kind in sorted(kinds, key=lambda k: (k.usd_per_h.value, k.curve.per_sample_s, k.type)):
        if not any(_beats(o, kind) and (not ends or _surer(o, kind)) for o in kept):
            kept.append(kind)
    return kept


def _beats(one: Kind, other: Kind) -> bool:
    """Return whether one kind is nowhere worse than another that is not cheaper."""
    same = one.workers == other.workers and one.spot == other.spot
    return (
        same
        and one.usd_per_h.value <= other.usd_per_h.value
        and one.curve.fixed_s <= other.curve.fixed_s
        and one.curve.per_sample_s <= other.curve.per_sample_s
        and one.curve.noise <= other.curve.noise
        and _memory_room(one) >= _memory_room(other)
        and _lost_less(one.transience, other.transience)
    )


def _surer(one: Kind, other: Kind) -> bool:
    """Return whether one kind's times and price are known as well as another's, or better."""
    return (
        one.curve.error <= other.curve.error
        and all(a <= b for a, b in zip(one.curve.spread, other.curve.spread, strict=True))
        and one.usd_per_h.high <= other.usd_per_h.high
    )


def _memory_room(kind: Kind) -> float:
    return float("inf") if kind.most_samples is None else kind.most_samples


def _lost_less(one: PreemptionRate | None, other: PreemptionRate | None) -> bool:
    """Return whether at no level of luck one is taken away more often than the other.

    Where recorded waits differ, neither is: a cluster's waits are of all its kinds together.
    """
    if one is None or other is None:
        return True  # both are on demand then
    alike = one.waits_s == other.waits_s
    return alike and all(a <= b for a, b in zip(one.rates_per_s, other.rates_per_s, strict=True))


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """What is to be trained."""

    samples: int  # of an epoch
    epochs: Epochs  # by batch
    gradient_bytes: float  # that a worker sends in a step
    links: Links | None = None  # between workers, as measured; ``None`` if they were not
    saves: SaveCosts = USUAL_SAVES  # what saves and restarts take, where machines are taken away
    servers: int = 0  # parameter servers on the workers' machines; 0 for an all-reduce
    # Of an epoch beside its steps, such as evaluation; the same on all machines
    beside_s: float = 0.0

    @property
    def ring(self) -> Reduces:
        """The all-reduce, or the parameter servers in its place.

        Over links that were not measured, 0.1 ms and 10 Gbit/s are assumed.
        """
        latency_s, bytes_per_s = 1e-4, 1.25e9
        if self.links is not None:
            latency_s, bytes_per_s = self.links.latency_s, self.links.bytes_per_s or inf
        links = (latency_s, bytes_per_s, self.gradient_bytes)
        return ParameterServers(self.servers, *links) if self.servers else Ring(*links)


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """A cluster, and the batch it trains."""

    kinds: tuple[Kind, ...]  # of its machines, at least one
    counts: tuple[int, ...]  # machines of each kind
    batch: int  # global batch in samples

    @property
    def name(self) -> str:
        """Counts and types, such as ``4 x g4dn.xlarge + 2 x g5.xlarge spot``."""
        both = zip(self.counts, self.kinds, strict=True)
        return " + ".join(f"{count} x {kind.name}" for count, kind in both)

    @property
    def place(self) -> str:
        return self.kinds[0].place

    @property
    def machines(self) -> int:
        return sum(self.counts)

    @property
    def workers(self) -> int:
        return sum(n * kind.workers for n, kind in zip(self.counts, self.kinds, strict=True))

    @property
    def spot(self) -> bool:
        return any(kind.spot for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class TrainingForecast:
    """What a choice comes to."""

    choice: ClusterChoice  # cluster and batch
    step: StepEstimate  # that it takes
    time_s: Interval  # of the whole training, with a 95 % interval
    cost_usd: Interval  # the same
    stretch: float  # factor that losses of machines make it longer by; in ``time_s`` already
    epochs: Interval  # that it trains at its batch; in ``time_s`` already

    @property
    def name(self) -> str:
        return self.choice.name


def outlook(
    choice: ClusterChoice, task: TrainingTask, step: StepEstimate | None = None
) -> TrainingForecast | None:
    """Return what a choice comes to; ``None`` if its epochs are not known, or it may never end.

    The errors of epochs, step, losses and price are taken as independent, in proportion. That of
    the step is the worst of its kinds: balanced workers all wait for the one that was judged too
    quick.

    Raises:
        InfeasibleShares: its batch does not fit.
    """
    epochs = task.epochs.at(choice.batch)
    if epochs is None:
        return None
    both = list(zip(choice.kinds, choice.counts, strict=True))
    step = step or exact_step([kind.machines(n) for kind, n in both], choice.batch, task.ring)
    # As many steps as the whole batches of an epoch, and one for the tail.
    each_s = -(-task.samples // choice.batch) * step.time_s + task.beside_s
    useful = _scaled(epochs, each_s)
    stretch = _stretch(choice, useful.value, task.saves)
    if stretch is None:
        return None
    known = task.links is not None or choice.workers == 1
    part = _step_part(both, step, known=known)
    least = max(exp(-Z95 * part), _least_part(both, step, known=known))
    time_s = product(useful, Interval(1.0, least, exp(Z95 * part)), stretch)
    prices = [_scaled(kind.usd_per_h, n / 3600.0) for kind, n in both]
    price = Interval(
        *(sum(getattr(one, end) for one in prices) for end in ("value", "low", "high"))
    )
    return TrainingForecast(choice, step, time_s, product(time_s, price), stretch.value, epochs)


def _stretch(choice: ClusterChoice, useful_s: float, saves: SaveCosts) -> Interval | None:
    """Return how many times as long losses make it; ``None`` if that has no end."""
    spot = [
        (kind.transience, n)
        for kind, n in zip(choice.kinds, choice.counts, strict=True)
        if kind.transience is not None
    ]
    if not spot or not useful_s:
        return Interval(1.0, 1.0, 1.0)
    rates = [
        sum(n * kind.rates_per_s[i] for kind, n in spot) for i in range(len(spot[0][0].rates_per_s))
    ]
    found = _slowdown(spot[0][0], tuple(rates), useful_s, saves.waiting(kind for kind, _ in spot))
    if not found.high < inf or not found.value < inf:
        return None
    # With rare losses the mean lies above what nearly all runs take.
    return Interval(found.value, min(found.low, found.value), max(found.high, found.value))


@lru_cache(maxsize=4096)
def _slowdown(
    one: PreemptionRate, rates: tuple[float, ...], useful_s: float, saves: SaveCosts
) -> Interval:
    """Return what losses cost at the rates of all machines; the same in many places."""
    return slowdown(replace(one, rates_per_s=rates), 1, useful_s, saves, level=0.95)


def product(*factors: Interval) -> Interval:
    """Return the product of independent figures, each with its 95 % interval.

    Halves of the intervals add up as squares, in the logarithm and on either side.

    >>> product(Interval(2.0, 1.0, 4.0), Interval(3.0, 3.0, 3.0))
    Interval(value=6.0, low=3.0, high=12.0)
    """
    value, down, up = 1.0, 0.0, 0.0
    for one in factors:
        value *= one.value
        down = hypot(down, log(one.value / one.low) if one.low > 0 else inf)
        up = hypot(up, log(one.high / one.value) if one.value > 0 else inf)
    return Interval(value, value * exp(-down), value * exp(up) if up < 700 else inf)


def step_error(kinds: Sequence[Kind], step: StepEstimate) -> float:
    """Return the deviation of a step's compute time, as a part: that of the least sure kind."""
    both = zip(kinds, step.shares, strict=True)
    return max(kind.curve.error_at(share) for kind, share in both)


def _step_part(both: Sequence[tuple[Kind, int]], step: StepEstimate, *, known: bool) -> float:
    compute = step_error(tuple(kind for kind, _ in both), step) * step.compute_s
    links = 0.0 if known else UNKNOWN_LINKS * step.communication_s
    return hypot(compute, links) / step.time_s


def _least_part(both: Sequence[tuple[Kind, int]], step: StepEstimate, *, known: bool) -> float:
    """Return which part of a step it takes at least, however little is known of the workers.

    Communication takes its time, and no worker is quicker than with fewer samples.
    """
    shares = zip(both, step.shares, strict=True)
    compute_s = max(kind.curve.least_s(share) for (kind, _), share in shares)
    links_s = step.communication_s * (1.0 if known else exp(-Z95 * UNKNOWN_LINKS))
    return min((compute_s + links_s) / step.time_s, 1.0)


def _scaled(one: Interval, factor: float) -> Interval:
    return Interval(one.value * factor, one.low * factor, one.high * factor)
