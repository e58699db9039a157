"""The time and cost of a whole training run on a cluster, with their intervals.

`Kind` is a type of machine to rent, `ClusterChoice` a number of each, `outlook` their forecast.
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
"""Error of an assumed link, in the logarithm: a factor of 2.7 (95 %)."""

USUAL_SAVES = SaveCosts(save_s=2.0, restart_s=(120.0,))
"""Default if nothing is known; the waiting time for a replacement machine varies most."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One type of machine in one place, on demand or as spot."""

    type: str  # as the catalogue names it.
    # Cloud, region and zone, between which links are known; machines of one cluster are in one
    # place.
    place: str
    workers: int  # of a machine, at least 1: its accelerators, or one.
    curve: Curve  # of one worker.
    usd_per_h: Interval  # price of a machine.
    most_samples: int | None = None  # that fit into a worker's memory; ``None`` for no limit.
    transience: PreemptionRate | None = None  # rate of preemptions; ``None`` on demand.
    # Of a machine, such as ``T4:2``; empty without any, or for a fraction of one.
    accelerators: str = ""
    distinguished: bool = False  # whether the name includes these accelerators.

    @property
    def spot(self) -> bool:
        return self.transience is not None

    @property
    def name(self) -> str:
        """Its type, with its accelerators where needed, and whether it is spot."""
        own = f"{self.type}+{self.accelerators or 'none'}" if self.distinguished else self.type
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

    A kind is beaten by one with as many workers, both on demand or both spot, that is at least as
    fast, cheap, large and durable. Replacing it machine by machine makes no cluster slower or more
    expensive, except for rounding of shares. So no best cluster is lost. Of equals, the first by
    name stays. Takes ``O(n log n + n * kept)``.
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
    """Return whether one kind's times and price are known at least as well as another's."""
    return (
        one.curve.error <= other.curve.error
        and all(a <= b for a, b in zip(one.curve.spread, other.curve.spread, strict=True))
        and one.usd_per_h.high <= other.usd_per_h.high
    )


def _memory_room(kind: Kind) -> float:
    return float("inf") if kind.most_samples is None else kind.most_samples


def _lost_less(one: PreemptionRate | None, other: PreemptionRate | None) -> bool:
    """Return whether one is preempted at most as often as the other at every quantile.

    With different recorded waiting times, the answer is no, because they apply to a whole cluster.
    """
    if one is None or other is None:
        return True  # both are on demand then
    alike = one.waits_s == other.waits_s
    return alike and all(a <= b for a, b in zip(one.rates_per_s, other.rates_per_s, strict=True))


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """The training run to plan."""

    samples: int  # of an epoch
    epochs: Epochs  # by batch
    gradient_bytes: float  # sent by a worker in a step
    links: Links | None = None  # between workers, as measured; ``None`` if they were not
    saves: SaveCosts = USUAL_SAVES  # times of saves and restarts, for spot machines.
    servers: int = 0  # parameter servers on the workers' machines; 0 for an all-reduce
    # Time of an epoch beyond its steps, such as evaluation; the same on all machines.
    beside_s: float = 0.0

    @property
    def ring(self) -> Reduces:
        """The all-reduce, or the parameter servers in its place.

        For links that were not measured, it assumes 0.1 ms and 10 Gbit/s.
        """
        latency_s, bytes_per_s = 1e-4, 1.25e9
        if self.links is not None:
            latency_s, bytes_per_s = self.links.latency_s, self.links.bytes_per_s or inf
        links = (latency_s, bytes_per_s, self.gradient_bytes)
        return ParameterServers(self.servers, *links) if self.servers else Ring(*links)


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """A cluster and its batch."""

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
    """The forecast of a choice."""

    choice: ClusterChoice  # cluster and batch
    step: StepEstimate  # one step
    time_s: Interval  # of the whole training, with a 95 % interval
    cost_usd: Interval  # the same
    stretch: float  # factor of the time due to preemptions; contained in ``time_s``
    epochs: Interval  # at its batch; contained in ``time_s``

    @property
    def name(self) -> str:
        return self.choice.name


def outlook(
    choice: ClusterChoice,
    task: TrainingTask,
    step: StepEstimate | None = None,
    measured_error: float | None = None,
) -> TrainingForecast | None:
    """Return the forecast of a choice; ``None`` if its epochs are not known, or it may never end.

    The relative errors of epochs, step, preemptions and price count as independent. That of
    the step is the worst of its kinds: balanced workers all wait for the one whose speed was
    overestimated. A measured ``step`` has its own relative deviation, ``measured_error``.

    Raises:
        InfeasibleShares: its batch does not fit.
    """
    epochs = task.epochs.at(choice.batch)
    if epochs is None:
        return None
    both = list(zip(choice.kinds, choice.counts, strict=True))
    step = step or exact_step([kind.machines(n) for kind, n in both], choice.batch, task.ring)
    # As many steps as an epoch has whole batches, and one for the tail.
    each_s = -(-task.samples // choice.batch) * step.time_s + task.beside_s
    useful = _scaled(epochs, each_s)
    stretch = _stretch(choice, useful.value, task.saves)
    if stretch is None:
        return None
    known = task.links is not None or choice.workers == 1
    part = measured_error or _step_part(both, step, known=known)
    lowest = 0.0 if measured_error else _least_part(both, step, known=known)
    least = max(exp(-Z95 * part), lowest)
    time_s = product(useful, Interval(1.0, least, exp(Z95 * part)), stretch)
    prices = [_scaled(kind.usd_per_h, n / 3600.0) for kind, n in both]
    price = Interval(
        *(sum(getattr(one, end) for one in prices) for end in ("value", "low", "high"))
    )
    return TrainingForecast(choice, step, time_s, product(time_s, price), stretch.value, epochs)


def _stretch(choice: ClusterChoice, useful_s: float, saves: SaveCosts) -> Interval | None:
    """Return the factor of the time due to preemptions; ``None`` if it is unbounded."""
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
    # With rare preemptions the mean is above the time of nearly all runs.
    return Interval(found.value, min(found.low, found.value), max(found.high, found.value))


@lru_cache(maxsize=4096)
def _slowdown(
    one: PreemptionRate, rates: tuple[float, ...], useful_s: float, saves: SaveCosts
) -> Interval:
    """Return the slow-down at the rates of all machines; cached, as many places share it."""
    return slowdown(replace(one, rates_per_s=rates), 1, useful_s, saves, level=0.95)


def product(*factors: Interval) -> Interval:
    """Return the product of independent values, each with its 95 % interval.

    Half-widths of the intervals add up as squares, in the logarithm and on either side.

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
    """Return the relative deviation of a step's compute time: that of the least certain kind."""
    both = zip(kinds, step.shares, strict=True)
    return max(kind.curve.error_at(share) for kind, share in both)


def _step_part(both: Sequence[tuple[Kind, int]], step: StepEstimate, *, known: bool) -> float:
    compute = step_error(tuple(kind for kind, _ in both), step) * step.compute_s
    links = 0.0 if known else UNKNOWN_LINKS * step.communication_s
    return hypot(compute, links) / step.time_s


def _least_part(both: Sequence[tuple[Kind, int]], step: StepEstimate, *, known: bool) -> float:
    """Return a lower bound of a step relative to its estimate, at any uncertainty of the workers.

    Communication takes its time, and no worker is faster than with fewer samples.
    """
    shares = zip(both, step.shares, strict=True)
    compute_s = max(kind.curve.least_s(share) for (kind, _), share in shares)
    links_s = step.communication_s * (1.0 if known else exp(-Z95 * UNKNOWN_LINKS))
    return min((compute_s + links_s) / step.time_s, 1.0)


def _scaled(one: Interval, factor: float) -> Interval:
    return Interval(one.value * factor, one.low * factor, one.high * factor)
