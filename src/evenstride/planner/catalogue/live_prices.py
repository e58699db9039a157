"""Today's prices from gpuhunt, which queries some clouds and has published lists of the others.

gpuhunt is a separate extra and is imported on demand. Its lists are renewed about once a
day; prices get the date on which they were fetched.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import date
from importlib import import_module
from math import inf
from typing import Any, Protocol

from evenstride.errors import ConfigError
from evenstride.planner.catalogue.offers import Catalogue, Offer, Refusal

CLOUDS = ("aws", "azure", "gcp")
"""Default clouds: the three whose machines are available to all customers."""

_BY_MEMORY = {("A100", 80.0): "A100-80GB", ("V100", 32.0): "V100-32GB"}
_WHOLE_GIB = {"A10": 24.0}  # Azure sells fractions of it
_ZONE_OF_GCP = re.compile(r"(?P<region>[a-z]+-[a-z]+\d+)-[a-z]")
_UNHEARD = logging.NullHandler()
_INSTEAD = "give a catalogue file, or use the shipped catalogue"


class GpuhuntItem(Protocol):
    """gpuhunt's data about a machine, its ``CatalogItem``; memory in GiB, prices per hour."""

    provider: str
    instance_name: str
    location: str
    price: float
    cpu: int | None
    memory: float | None
    gpu_count: int | None
    gpu_name: str | None
    gpu_memory: float | None
    spot: bool


def live_catalogue(on: date, clouds: Iterable[str] = CLOUDS) -> Catalogue:
    """Return the current offers from gpuhunt, over the network.

    If the list of a cloud cannot be fetched, gpuhunt leaves that cloud out, and a note says so.

    Args:
        on: today's date, which prices are labelled with.
        clouds: gpuhunt's names of clouds.

    Raises:
        ConfigError: gpuhunt is not installed, does not know a cloud, or cannot be reached.
    """
    gpuhunt = _gpuhunt()
    asked = list(clouds)
    try:
        items = gpuhunt.query(provider=asked)
    except ValueError as error:
        raise ConfigError(
            f"cannot fetch live prices of {', '.join(asked)}: gpuhunt reports {str(error)!r}; "
            f"use clouds that it supports, such as {', '.join(CLOUDS)}"
        ) from None
    except (OSError, gpuhunt.GPUHuntError) as error:
        raise ConfigError(f"cannot fetch live prices ({error}); {_INSTEAD}") from None
    found = catalogue_of(items, on, f"gpuhunt, queried for {', '.join(asked)} on {on}")
    silent = sorted(set(asked) - {offer.cloud for offer in found.offers})
    notes = (f"gpuhunt returned no offers of {', '.join(silent)}",) if silent else ()
    return replace(found, notes=notes)


def _gpuhunt() -> Any:
    # It logs a traceback for each list that it cannot fetch, to stderr unless there is a handler.
    logging.getLogger("gpuhunt").addHandler(_UNHEARD)
    try:
        return import_module("gpuhunt")
    except ImportError as error:
        raise ConfigError(
            f"live prices need gpuhunt, which cannot be imported ({error}): run pip install "
            f"'evenstride[plan]', or {_INSTEAD}"
        ) from None


def catalogue_of(items: Iterable[GpuhuntItem], on: date, source: str) -> Catalogue:
    """Return gpuhunt's items as a catalogue; rejections count its items from 1.

    gpuhunt lists a machine twice, on demand and as spot; both become one offer. Ignored are
    machines of which only the price is known, spot prices without an on-demand price, and
    duplicates.
    """
    found = _Found(on)
    for number, item in enumerate(items, start=1):
        try:
            found.add(number, item)
        except ValueError as error:
            found.refusals.append(Refusal(number, item.instance_name or "", str(error)))
    offers = found.offers()
    if not offers:
        why = "; ".join(map(str, found.refusals[:3])) or "it is empty"
        raise ConfigError(f"no offer of {source} is usable ({why}); {_INSTEAD}")
    refusals = sorted(found.refusals, key=lambda refusal: refusal.line)
    return Catalogue(offers, tuple(refusals), source)


_Key = tuple[str, str, str, str, str, float]


@dataclass(slots=True)
class _Found:
    """Items so far; those of one machine have one key."""

    on: date
    demand: dict[_Key, Offer] = field(default_factory=dict)
    spot: dict[_Key, tuple[int, float]] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)

    def add(self, number: int, item: GpuhuntItem) -> None:
        offer = _offer(item, self.on)
        key = (*offer.key, offer.accelerator, offer.accelerators)
        if key in (self.spot if item.spot else self.demand):
            raise ValueError("it is a duplicate; the first one is used")
        if item.spot:
            self.spot[key] = number, offer.usd_per_h
        else:
            self.demand[key] = offer

    def offers(self) -> tuple[Offer, ...]:
        for key in self.spot.keys() - self.demand.keys():
            why = "it has a spot price, but no on-demand price"
            self.refusals.append(Refusal(self.spot[key][0], key[3], why))
        return tuple(self._whole(key, offer) for key, offer in self.demand.items())

    def _whole(self, key: _Key, offer: Offer) -> Offer:
        if key not in self.spot:
            return offer
        price = self.spot[key][1]
        return replace(offer, spot_usd_per_h=price, spot_kind="listed", spot_on=self.on)


def _offer(item: GpuhuntItem, on: date) -> Offer:
    if not item.instance_name or not item.location:
        raise ValueError("it has no name or no location")
    if item.price is None or not 0.0 < item.price < inf:
        raise ValueError(f"its price is {item.price}, but must be above 0")
    if item.cpu is None or item.memory is None or item.gpu_count is None:
        raise ValueError("its processors and memory are not known")
    zone = _ZONE_OF_GCP.fullmatch(item.location) if item.provider == "gcp" else None
    name, count = _accelerators(item)
    return Offer(
        instance_type=item.instance_name,
        usd_per_h=float(item.price),
        cloud=item.provider,
        region=zone["region"] if zone else item.location,
        zone=item.location if zone else "",
        accelerator=name,
        accelerators=count,
        vcpus=float(item.cpu),
        memory_gib=float(item.memory),
        priced_on=on,
    )


def _accelerators(item: GpuhuntItem) -> tuple[str, float]:
    """Return the catalogue's name of an item's accelerators, and their number."""
    if not item.gpu_count:
        return "", 0.0
    if not item.gpu_name:
        raise ValueError("the type of its accelerators is not known")
    memory_gib = item.gpu_memory or 0.0
    name = _BY_MEMORY.get((item.gpu_name, memory_gib), item.gpu_name)
    whole = _WHOLE_GIB.get(name, memory_gib)
    part = min(memory_gib / whole, 1.0) if whole else 1.0
    return name, item.gpu_count * (part or 1.0)
