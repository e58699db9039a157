"""Which machines of a catalogue could train a workload, and how quickly, as far as is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date

from evenstride.planner.curves import Curve, fitted, transferred
from evenstride.planner.hardware import Power, power
from evenstride.planner.kinds import Kind
from evenstride.planner.offers import Offer, price_interval
from evenstride.planner.transience import from_offer
from evenstride.planner.workload import Device

_LEAST_MEMORY = 0.5  # of that of the measured type


@dataclass(frozen=True, slots=True)
class _Known:
    """A type that was measured: its curve, memory, and hardware if the catalogue has it."""

    device: Device
    curve: Curve
    power: Power | None
    accelerator: bool


@dataclass(frozen=True, slots=True)
class Rentable:
    """What a catalogue comes to for a workload.

    Args:
        kinds: that can be planned with.
        unknown: types of which nothing can be said.
        measured: types of the catalogue that were measured.
    """

    kinds: tuple[Kind, ...]
    unknown: tuple[str, ...]
    measured: tuple[str, ...]


def rentable(
    offers: Iterable[Offer],
    devices: Iterable[Device],
    on: date,
    *,
    spot: bool = False,
    transfer: bool = True,
    known_offers: Iterable[Offer] = (),
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
    """
    all_offers = list(offers)
    by_type = {offer.instance_type: offer for offer in (*known_offers, *all_offers)}
    known = [_known(device, by_type.get(device.type)) for device in devices]
    kinds, unknown = list[Kind](), dict[str, None]()
    for offer in all_offers:
        found = _curve(offer, known, transfer=transfer)
        if found is None:
            unknown[offer.instance_type] = None
            continue
        kinds += _kinds(offer, *found, on, spot=spot)
    types = {one.device.type for one in known}
    return Rentable(tuple(kinds), tuple(unknown), tuple(sorted(types & by_type.keys())))


def _known(device: Device, offer: Offer | None) -> _Known:
    hardware = None if offer is None else power(offer)
    accelerator = offer is not None and bool(offer.accelerator)
    return _Known(device, fitted(device.points), hardware, accelerator)


def _curve(offer: Offer, known: list[_Known], *, transfer: bool) -> tuple[Curve, int | None] | None:
    """Return one worker's curve and the samples that fit it, if anything is known."""
    for one in known:
        if one.device.type == offer.instance_type:
            return one.curve, one.device.most_samples
    hardware = power(offer) if float(offer.accelerators).is_integer() else None
    alike = [
        one
        for one in known
        if one.power is not None
        and hardware is not None
        and one.accelerator == bool(offer.accelerator)
        and _room(one, hardware) != 0
    ]
    if not transfer or hardware is None or not alike:
        return None
    nearest = min(alike, key=lambda one: transferred(one.curve, _of(one), hardware).error)
    return transferred(nearest.curve, _of(nearest), hardware), _room(nearest, hardware)


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


def _kinds(offer: Offer, curve: Curve, most: int | None, on: date, *, spot: bool) -> Iterator[Kind]:
    workers = max(int(offer.accelerators), 1)
    price = price_interval(offer, on)
    kind = Kind(offer.instance_type, offer.place, workers, curve, price, most)
    yield kind
    if spot and offer.spot_usd_per_h is not None:
        yield replace(
            kind,
            usd_per_h=price_interval(offer, on, spot=True),
            transience=from_offer(offer),
        )
