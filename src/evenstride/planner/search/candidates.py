"""The kinds of machines of a catalogue that could train a workload, and how quickly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date

from evenstride.core.gradients.noise_scale import Interval
from evenstride.errors import ConfigError
from evenstride.planner.catalogue.accelerators import Power, power
from evenstride.planner.catalogue.device_matching import identified, sorts_of
from evenstride.planner.catalogue.offers import Offer, price_interval
from evenstride.planner.search.step_time import Workers
from evenstride.planner.spot.preemption_rate import PreemptionRate, from_offer
from evenstride.planner.workload.step_curve import Curve, fitted, transferred
from evenstride.planner.workload.workload_profile import DeviceProfile

_LEAST_MEMORY = 0.5  # of that of the measured type


@dataclass(frozen=True, slots=True)
class _Known:
    """A type that was measured: its curve, memory, and hardware if the catalogue has it."""

    device: DeviceProfile
    type: str
    curve: Curve
    power: Power | None
    accelerator: str


@dataclass(frozen=True, slots=True)
class Rentable:
    """What a catalogue comes to for a workload."""

    kinds: tuple[Kind, ...]  # that can be planned with
    unknown: tuple[str, ...]  # types of which nothing can be said
    measured: tuple[str, ...]  # types of the catalogue that were measured
    # Of these, types with an accelerator whose steps a processor computed
    pretended: tuple[str, ...] = ()


def rentable(
    offers: Iterable[Offer],
    devices: Iterable[DeviceProfile],
    on: date,
    *,
    spot: bool = False,
    transfer: bool = True,
    known_offers: Iterable[Offer] = (),
    force: bool = False,
) -> Rentable:
    """Return the kinds of machines that offers and measured devices make.

    A type that was measured is taken as measured. Another one is carried over from the measured one
    whose hardware is nearest, of the same kind: accelerators from accelerators, processors from
    processors; see `transferred`.

    Args:
        offers: of a catalogue.
        devices: of a profile.
        on: day for which prices are asked.
        spot: whether machines that may be taken away are planned with, too.
        transfer: whether types that were not measured are; not those with a part of an accelerator.
        known_offers: more offers, which tell what hardware the measured types have.
        force: whether to take steps that a processor computed as those of a type's accelerator.

    Raises:
        ConfigError: a measured type is on offer with several accelerators, and it is not known with
            which it was measured; or it has one, and its steps were computed by a processor.
    """
    all_offers = list(offers)
    told = (*known_offers, *all_offers)
    sorts, by_sort = sorts_of(told), {(one.instance_type, one.accelerator): one for one in told}
    own = [(device, *identified(device, sorts)) for device in devices]
    known = [_known(device, of, with_, by_sort.get((of, with_))) for device, of, with_ in own]
    pretended = tuple(one.device.type for one in known if _pretends(one))
    if pretended and not force:
        raise ConfigError(_by_a_processor(next(one for one in known if _pretends(one))))
    several = _several(told)
    kinds, unknown = list[Kind](), dict[str, None]()
    for offer in all_offers:
        found = _curve(offer, known, transfer=transfer)
        if found is None:
            unknown[offer.instance_type] = None
            continue
        named = offer.instance_type in several
        kinds += _kinds(offer, *found, on, spot=spot, told_apart=named)
    types = {one.device.type for one in known if (one.type, one.accelerator) in by_sort}
    return Rentable(tuple(kinds), tuple(unknown), tuple(sorted(types)), pretended)


def _pretends(one: _Known) -> bool:
    """Return whether a type has an accelerator, and a processor computed what was measured."""
    return bool(one.accelerator) and one.device.computed_on == "cpu"


def _by_a_processor(one: _Known) -> str:
    return (
        f"{one.device.type} has the accelerator {one.accelerator}, and what was measured as its "
        "steps was computed by a processor: the script's model is not on a CUDA device. So nothing "
        "is known of steps on that accelerator, and it would stay idle. Move model and batches to "
        'the device in the script (.to("cuda")) and measure again there, or call the machine what '
        "it is (evenstride profile --type, or --as). --force plans as if the accelerator had taken "
        "these times, which is for trying things out"
    )


def accelerators_of(offer: Offer) -> str:
    """Return an offer's accelerators such as ``T4:2``; empty without any, or with a part of one."""
    count = offer.accelerators
    whole = bool(offer.accelerator) and count >= 1 and float(count).is_integer()
    return f"{offer.accelerator}:{int(count)}" if whole else ""


def _several(offers: Iterable[Offer]) -> set[str]:
    """Return the types whose name leaves open which accelerators they have."""
    each = {(offer.instance_type, accelerators_of(offer)) for offer in offers}
    count = Counter(name for name, _ in each)
    return {name for name, times in count.items() if times > 1}


def _known(device: DeviceProfile, of: str, accelerator: str, offer: Offer | None) -> _Known:
    hardware = None if offer is None else power(offer)
    return _Known(device, of, fitted(device.points), hardware, accelerator)


def _curve(offer: Offer, known: list[_Known], *, transfer: bool) -> tuple[Curve, int | None] | None:
    """Return one worker's curve and the samples that fit it, if anything is known."""
    for one in known:
        if (one.type, one.accelerator) == (offer.instance_type, offer.accelerator):
            return one.curve, one.device.most_samples
    hardware = power(offer) if float(offer.accelerators).is_integer() else None
    alike = [
        one
        for one in known
        if one.power is not None
        and hardware is not None
        and bool(one.accelerator) == bool(offer.accelerator)
        and (one.device.computed_on != "cuda" or bool(one.accelerator))
        and _room(one, hardware) != 0
    ]
    if not transfer or hardware is None or not alike:
        return None
    nearest = min(alike, key=lambda one: transferred(one.curve, _of(one), hardware).error)
    curve = transferred(nearest.curve, _of(nearest), hardware, nearest.device.type)
    return curve, _room(nearest, hardware)


def _room(known: _Known, hardware: Power) -> int | None:
    """Return the samples that fit hardware that was not measured; 0 if nobody knows.

    A limit that was met is carried over in proportion to memory. Where none was met, it is known
    of the sizes that were measured that they fit, and of less memory that less does; with less than
    half, the model itself may not.
    """
    device, own = known.device, _of(known)
    if not own.gib or not hardware.gib:
        return device.most_samples
    ratio = hardware.gib / own.gib
    if ratio < _LEAST_MEMORY:
        return 0
    if device.most_samples is not None:
        return max(int(device.most_samples * ratio), 1)
    largest = max(point.samples for point in device.points)
    return None if ratio >= 1 else max(int(largest * ratio), 1)


def _of(known: _Known) -> Power:
    assert known.power is not None, "only those with known hardware are carried over"
    return known.power


def _kinds(
    offer: Offer, curve: Curve, most: int | None, on: date, *, spot: bool, told_apart: bool
) -> Iterator[Kind]:
    kind = Kind(
        *(offer.instance_type, offer.place, max(int(offer.accelerators), 1), curve),
        *(price_interval(offer, on), most),
        accelerators=accelerators_of(offer),
        told_apart=told_apart,
    )
    yield kind
    if spot and offer.spot_usd_per_h is not None:
        yield replace(
            kind,
            usd_per_h=price_interval(offer, on, spot=True),
            transience=from_offer(offer),
        )


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

    Where their recorded waits differ, neither is said to be: a cluster's waits are of all its
    kinds together.
    """
    if one is None or other is None:
        return True  # both are on demand then
    alike = one.waits_s == other.waits_s
    return alike and all(a <= b for a, b in zip(one.rates_per_s, other.rates_per_s, strict=True))
