"""The kinds of machines of a catalogue that could train a workload, and their speed.

Google's N1 machines are available without accelerators and with several, all under one name. A
time measured with one of them says nothing about the others, so `identified` distinguishes them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date

from evenstride.errors import ConfigError
from evenstride.planner.catalogue.offers import NO_ACCELERATOR, Offer, Power, power, price_interval
from evenstride.planner.search.training_forecast import Kind
from evenstride.planner.spot_losses import PreemptionRate, from_offer
from evenstride.planner.workload.step_time import Curve, fitted, transferred
from evenstride.planner.workload.workload_profile import DeviceProfile

Sorts = Mapping[str, frozenset[str]]
"""Accelerators with which each type is on offer, by its name; an empty name for none."""


def sorts_of(offers: Iterable[Offer]) -> Sorts:
    found = dict[str, set[str]]()
    for offer in offers:
        found.setdefault(offer.instance_type, set()).add(offer.accelerator)
    return {name: frozenset(all_of) for name, all_of in found.items()}


def identified(device: DeviceProfile, sorts: Sorts) -> tuple[str, str]:
    """Return the type and the accelerator of a measured device.

    A type with only one accelerator is identified by its name. Otherwise the device's own name
    decides, such as ``Tesla T4``, or the accelerator after the type's name, as in
    ``n1-standard-8+T4`` or ``n1-standard-8+none``. Raises a `ConfigError` if it is ambiguous.

    >>> sorts = {"n1-standard-8": frozenset({"", "T4"})}
    >>> points = ({"samples": 8, "step_s": 0.1},)
    >>> identified(DeviceProfile(type="n1-standard-8", device="Tesla T4", points=points), sorts)
    ('n1-standard-8', 'T4')
    """
    there = sorts.get(device.type)
    if there is None:
        return _by_full_name(device.type, sorts)
    if len(there) == 1:
        return device.type, next(iter(there))
    named = _parts(device.device)
    fitting = [one for one in sorted(there) if one and _parts(one) <= named]
    if not fitting:
        raise ConfigError(_ambiguous(device, there))
    return device.type, max(fitting, key=lambda one: len(_parts(one)))


def _by_full_name(name: str, sorts: Sorts) -> tuple[str, str]:
    own, plus, accelerator = name.rpartition("+")
    wanted = "" if accelerator == NO_ACCELERATOR else accelerator
    return (own, wanted) if plus and wanted in sorts.get(own, ()) else (name, "")


def _parts(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _ambiguous(device: DeviceProfile, there: Iterable[str]) -> str:
    names = [f"{device.type}+{one or NO_ACCELERATOR}" for one in sorted(there)]
    ran = f"ran on {device.device}" if device.device else "does not name its device"
    return (
        f"{device.type} is on offer with different accelerators, and the profile {ran}; name "
        f"it {', '.join(names[:-1])} or {names[-1]} (evenstride profile --type, or --as), or give "
        "a --catalog that has the type with only one of them"
    )


_MOST_NAMED = 5  # spot machines in an error
_LEAST_MEMORY = 0.5  # as a fraction of that of the measured type


@dataclass(frozen=True, slots=True)
class _Known:
    """A measured type: its curve, memory, and hardware if the catalogue has it."""

    device: DeviceProfile
    type: str
    curve: Curve
    power: Power | None
    accelerator: str


@dataclass(frozen=True, slots=True)
class Rentable:
    """The machines of a catalogue for a workload."""

    kinds: tuple[Kind, ...]  # usable in a plan
    unknown: tuple[str, ...]  # types without a forecast
    measured: tuple[str, ...]  # types of the catalogue that were measured
    # Measured types with an accelerator whose steps a processor computed
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
    """Return the kinds of machines from offers and measured devices, with prices of a day.

    A measured type uses its measurements. With ``transfer``, another one is estimated from the
    measured one with the nearest hardware, of the same kind (accelerators from accelerators, see
    `transferred`), but never for a fraction of an accelerator. ``known_offers`` give the hardware
    of the measured types. ``force`` accepts steps that a processor computed as the accelerator's.

    Raises:
        ConfigError: a measured type is on offer with several accelerators, and it is not known
            which one was measured; or it has one, but a processor computed its steps.
    """
    all_offers = list(offers)
    every = (*known_offers, *all_offers)
    sorts = sorts_of(every)
    hardware = {(one.instance_type, one.accelerator): power(one) for one in every}
    own = [(device, *identified(device, sorts)) for device in devices]
    known = [
        _Known(device, of, fitted(device.points), hardware.get((of, with_)), with_)
        for device, of, with_ in own
    ]
    pretended = tuple(one.device.type for one in known if _pretends(one))
    if pretended and not force:
        raise ConfigError(_by_a_processor(next(one for one in known if _pretends(one))))
    several = _several(every)
    kinds, unknown = list[Kind](), dict[str, None]()
    for offer in all_offers:
        found = _curve(offer, known, transfer=transfer)
        if found is None:
            unknown[offer.instance_type] = None
            continue
        named = offer.instance_type in several
        kinds += _kinds(offer, *found, on, spot=spot, distinguished=named)
    types = {one.device.type for one in known if (one.type, one.accelerator) in hardware}
    return Rentable(tuple(kinds), tuple(unknown), tuple(sorted(types)), pretended)


def _pretends(one: _Known) -> bool:
    return bool(one.accelerator) and one.device.computed_on == "cpu"


def _by_a_processor(one: _Known) -> str:
    return (
        f"{one.device.type} has the accelerator {one.accelerator}, but a CPU computed the measured "
        "steps: the script's model is not on a CUDA device. So the step time on that accelerator "
        "is not known, and the accelerator would stay idle. Move model and batches to the device "
        'in the script (.to("cuda")) and measure again there, or give the correct type of the '
        "machine (evenstride profile --type, or --as). --force plans as if the accelerator had "
        "these times, which is only for experiments"
    )


def accelerators_of(offer: Offer) -> str:
    """Return an offer's accelerators such as ``T4:2``; empty without any, or for a fraction."""
    count = offer.accelerators
    whole = bool(offer.accelerator) and count >= 1 and float(count).is_integer()
    return f"{offer.accelerator}:{int(count)}" if whole else ""


def _several(offers: Iterable[Offer]) -> set[str]:
    """Return the types whose name does not determine their accelerators."""
    each = {(offer.instance_type, accelerators_of(offer)) for offer in offers}
    count = Counter(name for name, _ in each)
    return {name for name, times in count.items() if times > 1}


def _curve(offer: Offer, known: list[_Known], *, transfer: bool) -> tuple[Curve, int | None] | None:
    """Return one worker's curve and the samples that fit it; ``None`` if not known."""
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
    """Return the samples that fit hardware that was not measured; 0 if not known.

    A measured memory limit is scaled in proportion to memory. Without one, the measured
    sizes are known to fit, and less memory fits less. With less than half, the model itself may
    not fit.
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
    assert known.power is not None, "only types with known hardware are used for estimates"
    return known.power


def _kinds(
    offer: Offer, curve: Curve, most: int | None, on: date, *, spot: bool, distinguished: bool
) -> Iterator[Kind]:
    kind = Kind(
        type=offer.instance_type,
        place=offer.place,
        workers=max(int(offer.accelerators), 1),
        curve=curve,
        usd_per_h=price_interval(offer, on),
        most_samples=most,
        accelerators=accelerators_of(offer),
        distinguished=distinguished,
    )
    yield kind
    if spot and offer.spot_usd_per_h is not None:
        yield replace(
            kind,
            usd_per_h=price_interval(offer, on, spot=True),
            transience=from_offer(offer),
        )


def with_recorded(kinds: Sequence[Kind], known: Mapping[str, PreemptionRate]) -> tuple[Kind, ...]:
    """Return the kinds with recorded rates of the spot ones; "" stands for all types."""
    there = sorted({kind.type for kind in kinds if kind.spot})
    for name in known:
        if name and name not in there:
            available = ", ".join(there[:_MOST_NAMED]) + (
                " and more" if len(there) > _MOST_NAMED else ""
            )
            raise ConfigError(
                f"preemptions of {name} were recorded, but it is not among the spot machines of "
                f"the plan ({available or 'none'}); name one of them after the file"
            )
    return tuple(
        replace(kind, transience=known.get(kind.type, known.get("", kind.transience)))
        if kind.spot
        else kind
        for kind in kinds
    )
