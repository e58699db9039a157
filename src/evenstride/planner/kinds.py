"""Kinds of machines that may be rented: an offer, and what its workers would take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evenstride.core.gradient_noise import Interval
from evenstride.planner.curves import Curve
from evenstride.planner.steps import Workers
from evenstride.planner.transience import Transience


@dataclass(frozen=True, slots=True)
class Kind:
    """One type of machine in one place, on demand or as spot.

    Args:
        type: as the catalogue names it.
        place: cloud, region and zone, between which links are known; machines of one cluster are
            in one place.
        workers: of a machine, at least 1: its accelerators, or one.
        curve: of one worker.
        usd_per_h: price of a machine.
        most_samples: that fit into a worker's memory; ``None`` for no limit.
        transience: how soon machines are taken away; ``None`` on demand.
        accelerators: of a machine, such as ``T4:2``; empty without any, or with a part of one.
        told_apart: whether the name needs them: the type is on offer with others, too.
    """

    type: str
    place: str
    workers: int
    curve: Curve
    usd_per_h: Interval
    most_samples: int | None = None
    transience: Transience | None = None
    accelerators: str = ""
    told_apart: bool = False

    @property
    def spot(self) -> bool:
        """Whether it may be taken away."""
        return self.transience is not None

    @property
    def name(self) -> str:
        """Its type, with its accelerators where needed, and whether it is spot."""
        own = f"{self.type}+{self.accelerators or 'none'}" if self.told_apart else self.type
        return f"{own} spot" if self.spot else own

    def machines(self, count: int) -> Workers:
        """Return the workers of so many machines."""
        return Workers(self.curve, count * self.workers, self.most_samples)


def by_place(kinds: Iterable[Kind]) -> dict[str, list[Kind]]:
    """Return the kinds of each place."""
    found: dict[str, list[Kind]] = {}
    for kind in kinds:
        found.setdefault(kind.place, []).append(kind)
    return found


def undominated(kinds: Sequence[Kind], *, ends: bool = False) -> list[Kind]:
    """Return the kinds of a place without those that another one beats in everything.

    Beaten is who has as many workers, on demand or spot alike, and is neither quicker, nor cheaper,
    nor larger, nor longer there. Putting the better kind in its place, machine by machine, makes no
    cluster slower or dearer, but for rounding of shares; so no best cluster is lost. Of equals, the
    first by name stays.

    Args:
        kinds: of one place.
        ends: whether the ends of intervals count as well: who is less sure does not beat then.

    Cost:
        O(n log n + n * kept).
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
        and _room(one) >= _room(other)
        and _lost_less(one.transience, other.transience)
    )


def _surer(one: Kind, other: Kind) -> bool:
    """Return whether one kind's times and price are known as well as another's, or better."""
    return (
        one.curve.error <= other.curve.error
        and all(a <= b for a, b in zip(one.curve.spread, other.curve.spread, strict=True))
        and one.usd_per_h.high <= other.usd_per_h.high
    )


def _room(kind: Kind) -> float:
    return float("inf") if kind.most_samples is None else kind.most_samples


def _lost_less(one: Transience | None, other: Transience | None) -> bool:
    """Return whether at no level of luck one is taken away more often than the other.

    Where their recorded waits differ, neither is said to be: a cluster's waits are of all its
    kinds together.
    """
    if one is None or other is None:
        return True  # both are on demand then
    alike = one.waits_s == other.waits_s
    return alike and all(a <= b for a, b in zip(one.rates_per_s, other.rates_per_s, strict=True))
