"""Machines on offer: their prices, with dates, and the peak performance of their accelerators.

A price is valid on one day. `price_interval` states the rules for its error today; this module
does not know today's date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import date
from difflib import get_close_matches
from math import exp, hypot, inf, sqrt

from evenstride.core.formatting import listed
from evenstride.core.gradients.noise_scale import Interval
from evenstride.errors import ConfigError

NO_ACCELERATOR = "none"
"""Name of machines without accelerators in a selection."""

_DAYS_OF_A_YEAR = 365.25
_UNDATED_YEARS = 1.0
_CHEAPER, _DEARER = 0.85, 1.05  # factors of a list price, after a year
_SPOT_AT_ONCE, _SPOT_YEARLY = 0.12, 0.39  # half-widths of 95 % intervals of the logarithm
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A type of machine in one place, and its prices; ``None`` stands for unknown values."""

    instance_type: str  # the cloud's name of it
    usd_per_h: float  # on demand, above 0
    cloud: str = ""  # in lower case; empty if it is no cloud
    region: str = ""
    zone: str = ""  # empty if the price holds in the whole region
    accelerator: str = ""  # name of one; empty without accelerators
    accelerators: float = 0.0  # their number; may be fractional
    vcpus: float | None = None  # virtual processors
    memory_gib: float | None = None
    # Price of a preemptible machine; ``None`` if not offered
    spot_usd_per_h: float | None = None
    # ``listed`` by the cloud, or ``estimated`` from the on-demand price and a saving of another
    # day; empty without a spot price
    spot_kind: str = ""
    # Range of the fraction of such machines that is preempted in a month, 0 to 1
    interruption: tuple[float, float] | None = None
    priced_on: date | None = None  # date of the on-demand price
    spot_on: date | None = None  # date of the spot price, or of its saving

    def __post_init__(self) -> None:
        spot = self.spot_usd_per_h
        if not 0.0 < self.usd_per_h < inf or not (spot is None or 0.0 < spot < inf):
            raise ConfigError(
                f"invalid prices of {self.instance_type}: {self.usd_per_h} USD/h, as spot {spot}: "
                "expected prices above 0; leave out the spot price if it is not offered"
            )
        if self.interruption and not 0.0 <= self.interruption[0] <= self.interruption[1] <= 1.0:
            raise ConfigError(
                f"invalid interruption {self.interruption} of {self.instance_type}: expected two "
                "fractions from 0 to 1, the smaller one first"
            )

    @property
    def place(self) -> str:
        """Cloud, region and zone, as far as known."""
        return "/".join(part for part in (self.cloud, self.region, self.zone) if part)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Place and type; rows of a file with the same key are duplicates."""
        return self.cloud, self.region, self.zone, self.instance_type


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rejected row."""

    line: int
    instance_type: str
    why: str

    def __str__(self) -> str:
        named = f" ({self.instance_type})" if self.instance_type else ""
        return f"line {self.line}{named}: {self.why}"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Offers, and the rejected rows of the source."""

    offers: tuple[Offer, ...]  # valid ones, in the order of the source
    refusals: tuple[Refusal, ...]
    source: str  # where the data come from
    notes: tuple[str, ...] = ()  # further findings, one sentence each

    def select(
        self,
        *,
        clouds: Iterable[str] = (),
        regions: Iterable[str] = (),
        types: Iterable[str] = (),
        accelerators: Iterable[str] = (),
    ) -> Catalogue:
        """Return the catalogue with only these offers; names are case-insensitive.

        Each name must be in the catalogue. The result may be empty if no offer matches all of
        them.
        """
        asked: tuple[tuple[str, Iterable[str], Callable[[Offer], str]], ...] = (
            ("cloud", clouds, lambda offer: offer.cloud),
            ("region", regions, lambda offer: offer.region),
            ("type", types, lambda offer: offer.instance_type),
            ("accelerator", accelerators, lambda offer: offer.accelerator or NO_ACCELERATOR),
        )
        offers = self.offers
        for what, names, of in asked:
            wanted = {name.lower() for name in names}
            self._check_known(what, wanted, {of(offer) for offer in self.offers})
            offers = tuple(o for o in offers if not wanted or of(o).lower() in wanted)
        return replace(self, offers=offers)

    def _check_known(self, what: str, wanted: set[str], known: set[str]) -> None:
        lower = {name.lower(): name for name in sorted(known) if name}
        for name in sorted(wanted - lower.keys()):
            near = [lower[found] for found in get_close_matches(name, lower)]
            hint = (
                f"did you mean {' or '.join(near)}?"
                if near
                else f"available: {listed(lower, _MOST_NAMED) or 'none'}"
            )
            raise ConfigError(f"{self.source} has no {what} named {name!r}; {hint}")


def price_interval(offer: Offer, on: date, *, spot: bool = False) -> Interval:
    """Return the price in dollars per hour on a day, with its 95 % interval.

    - *On demand*, a list price falls by at most 15 % in a year, and rises by at most 5 %. This
      assumption lies between two facts. Google's E2 machines cost the same within 0.02 % as about
      three years before; AWS cut its H100 machines by up to 45 % two years after their release.
    - *A spot price* is off by 12 % at once, and by 39 % times the root of the years (of its
      logarithm, both independent). Measured: six recorded zones changed by up to 12 % within
      a week (standard deviation 6 %); five prices of V100 and E2 machines changed between -33 % and
      +100 % in two to three years (20 % in a year, growing with its root).
    - *Mixed dates.* A spot price estimated from a saving of another day also has the error of
      the on-demand price over the days in between.
    - A spot machine never costs more than one on demand, so the interval ends there.
    - A price without a date counts as a year old.

    Args:
        offer: with its prices and their dates.
        on: the day of the result; a price of a later day is as uncertain as one of an earlier day.
        spot: whether to return the spot price.

    Raises:
        ConfigError: there is no spot price.

    >>> old = Offer(instance_type="x", usd_per_h=1.0, priced_on=date(2024, 1, 1))
    >>> found = price_interval(old, date(2025, 12, 31))
    >>> round(found.low, 2), found.value, round(found.high, 2)
    (0.72, 1.0, 1.1)
    """
    years = _years(offer.priced_on, on)
    low, high = offer.usd_per_h * _CHEAPER**years, offer.usd_per_h * _DEARER**years
    if not spot:
        return Interval(offer.usd_per_h, low, high)
    value = _spot_usd_per_h(offer)
    width = hypot(_SPOT_AT_ONCE, _SPOT_YEARLY * sqrt(_years(offer.spot_on, on)))
    between = _between(offer)
    cheapest, dearest = value * exp(-width), value * exp(width)
    most = min(dearest * _DEARER**between, max(value, high))
    return Interval(value, cheapest * _CHEAPER**between, most)


def _spot_usd_per_h(offer: Offer) -> float:
    if offer.spot_usd_per_h is None:
        raise ConfigError(
            f"{offer.instance_type} in {offer.place or 'its place'} has no spot price; use the "
            "on-demand price, or add a spot price to the catalogue"
        )
    return offer.spot_usd_per_h


def _years(day: date | None, on: date) -> float:
    return _UNDATED_YEARS if day is None else abs((on - day).days) / _DAYS_OF_A_YEAR


def _between(offer: Offer) -> float:
    """Return the years between the two dates of an estimated price."""
    if offer.spot_kind != "estimated" or offer.spot_on is None:
        return 0.0
    return _years(offer.priced_on, offer.spot_on)


def price_label(offer: Offer, *, spot: bool = False) -> str:
    """Return the price as text, with its date or dates.

    Raises:
        ConfigError: there is no spot price.

    >>> price_label(Offer(instance_type="x", usd_per_h=3.06, priced_on=date(2022, 11, 22)))
    '3.06 USD/h (2022-11-22)'
    """
    if not spot:
        return f"{offer.usd_per_h:.4g} USD/h ({_day(offer.priced_on)})"
    value = _spot_usd_per_h(offer)
    date_text = _day(offer.spot_on)
    if offer.spot_kind == "estimated":
        date_text = f"estimated: price of {_day(offer.priced_on)}, saving of {date_text}"
    return f"{value:.4g} USD/h ({date_text})"


def _day(day: date | None) -> str:
    return "undated" if day is None else day.isoformat()


@dataclass(frozen=True, slots=True)
class Power:
    """Peak performance of one worker's device."""

    flops_per_s: float
    bytes_per_s: float
    gib: float | None = None


ACCELERATORS: dict[str, Power] = {
    name: Power(tflops * 1e12, gbytes * 1e9, gib)
    for name, tflops, gbytes, gib in (
        ("K520", 2.4, 160, 4),
        ("K80", 4.1, 240, 12),
        ("M60", 4.8, 160, 8),
        ("P4", 5.5, 192, 8),
        ("P100", 9.5, 732, 16),
        ("V100", 15.7, 900, 16),
        ("V100-32GB", 15.7, 900, 32),
        ("T4", 8.1, 320, 16),
        ("T4G", 8.1, 320, 16),
        ("A10", 31.2, 600, 24),
        ("A10G", 31.2, 600, 24),
        ("L4", 30.3, 300, 24),
        ("L40S", 91.6, 864, 48),
        ("A100", 19.5, 1555, 40),
        ("A100-80GB", 19.5, 2039, 80),
        ("H100", 67.0, 3350, 80),
        ("H200", 67.0, 4800, 141),
    )
}
"""Peak single-precision performance and memory bandwidth, for one accelerator each; boards with two
processors count as two.

Source:
    The makers' data sheets as repeated in public tables: T4, V100, A100 and H100 were read there;
    the others are from memory and not verified. Half-precision peaks are left out: they would
    overstate the lead of every newer card over its arithmetic. The error of a transfer may or may
    not cover them, depending on the workload.
"""

SHARED = ("t1.", "t2.", "t3.", "t3a.", "t4g.", "e2-micro", "e2-small", "e2-medium", "f1-", "g1-")
"""Name prefixes of machines with shared processors."""


def power(offer: Offer) -> Power | None:
    """Return the performance of one worker of a machine; ``None`` if it is not known.

    A machine without accelerators is one worker, in proportion to its virtual processors, unless
    these are shared. Such a performance compares only with its own kind.
    """
    if offer.accelerator:
        return ACCELERATORS.get(offer.accelerator)
    if not offer.vcpus or offer.instance_type.startswith(SHARED):
        return None
    return Power(offer.vcpus, offer.vcpus, offer.memory_gib)


_NAMED = 8


def priced_by_memory(catalogue: Catalogue, usd_per_gib_h: float, on: date) -> Catalogue:
    """Return a catalogue in which a machine costs as much as its memory, whatever its type.

    The memory is that of the machine, not of its accelerators. A spot price keeps its ratio to the
    price on demand. Machines of unknown memory are left out, and a note says how many.

    Source:
        Tyagi and Sharma, "Scavenger", CCGRID 2023, section V-D and figure 12: machines priced by
        their memory. The treatment of spot prices is ours.

    Args:
        catalogue: to price.
        usd_per_gib_h: US dollars per GiB and hour, above 0.
        on: the day on which this price is valid.

    Raises:
        ConfigError: the price is not above 0, or no offer has a known memory.
    """
    if not 0.0 < usd_per_gib_h < inf:
        raise ConfigError(
            f"invalid price of {usd_per_gib_h} USD per GiB and hour: expected a number above 0, "
            "such as 0.004"
        )
    offers = tuple(_by_memory(one, usd_per_gib_h, on) for one in catalogue.offers if one.memory_gib)
    if not offers:
        raise ConfigError(
            f"{catalogue.source} has no memory sizes, so machines cannot be priced by memory; add "
            "a column MemoryGiB, or leave --usd-per-gib-h out"
        )
    left_out = len(catalogue.offers) - len(offers)
    notes = (f"{left_out} offers of unknown memory have no price by memory",) if left_out else ()
    source = f"{usd_per_gib_h:g} USD per GiB of memory and hour, for machines of {catalogue.source}"
    return replace(catalogue, offers=offers, source=source, notes=(*catalogue.notes, *notes))


def _by_memory(offer: Offer, usd_per_gib_h: float, on: date) -> Offer:
    usd_per_h = usd_per_gib_h * (offer.memory_gib or 0.0)
    spot = offer.spot_usd_per_h
    scaled = None if spot is None else spot * usd_per_h / offer.usd_per_h
    return replace(offer, usd_per_h=usd_per_h, spot_usd_per_h=scaled, priced_on=on)


def selected(
    catalogue: Catalogue, regions: Iterable[str] = (), types: Iterable[str] = ()
) -> Catalogue:
    """Return the offers of some regions and types."""
    wanted, named = tuple(regions), tuple(types)
    found = catalogue.select(regions=wanted, types=named)
    if found.offers or not catalogue.offers:
        return found
    there = {offer.region for offer in catalogue.select(types=named).offers}
    here = sorted({offer.instance_type for offer in catalogue.select(regions=wanted).offers})
    more = f" and {len(here) - _NAMED} more" if len(here) > _NAMED else ""
    raise ConfigError(
        f"{catalogue.source} has no {' or '.join(named)} in {' or '.join(wanted)}: --types and "
        f"--regions together match no offer. The types are in {', '.join(sorted(there))}; the "
        f"regions have {', '.join(here[:_NAMED])}{more}; omit or change one of the two options"
    )
