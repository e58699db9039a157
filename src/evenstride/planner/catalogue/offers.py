"""Machines on offer: their prices, with dates, and what their accelerators can do at most.

A price is what it was on some day. `price_interval` states the rules by which it may be off today;
nothing here knows what day it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import date
from difflib import get_close_matches
from math import exp, hypot, inf, sqrt

from evenstride.core.gradients.noise_scale import Interval
from evenstride.errors import ConfigError

NO_ACCELERATOR = "none"
"""What a selection calls machines without accelerators."""

_DAYS_OF_A_YEAR = 365.25
_UNDATED_YEARS = 1.0
_CHEAPER, _DEARER = 0.85, 1.05  # of a list price, after a year
_SPOT_AT_ONCE, _SPOT_YEARLY = 0.12, 0.39  # half of 95 % intervals of the logarithm
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A type of machine in one place, and its prices; ``None`` is for what is not known."""

    instance_type: str  # as the cloud names it
    usd_per_h: float  # on demand, above 0
    cloud: str = ""  # in lower case; empty if it is none
    region: str = ""
    zone: str = ""  # empty if the price holds in all of the region
    accelerator: str = ""  # name of one; empty without any
    accelerators: float = 0.0  # how many; a part of one is possible
    vcpus: float | None = None  # virtual processors
    memory_gib: float | None = None
    # Price of a machine that may be taken away; ``None`` if there is none
    spot_usd_per_h: float | None = None
    # Whether that is ``listed`` by the cloud, or ``estimated`` from the price on demand and a
    # saving of another day; empty without a spot price
    spot_kind: str = ""
    # Which part of such machines is taken away in a month, from and to, 0 to 1
    interruption: tuple[float, float] | None = None
    priced_on: date | None = None  # day of the price on demand
    spot_on: date | None = None  # that of the spot price, or of its saving

    def __post_init__(self) -> None:
        spot = self.spot_usd_per_h
        if not 0.0 < self.usd_per_h < inf or not (spot is None or 0.0 < spot < inf):
            raise ConfigError(
                f"{self.instance_type} at {self.usd_per_h} USD/h, as spot at {spot}: a price is "
                "above 0; leave the spot price out where there is none"
            )
        if self.interruption and not 0.0 <= self.interruption[0] <= self.interruption[1] <= 1.0:
            raise ConfigError(
                f"{self.instance_type} taken away by {self.interruption} a month: these are parts "
                "of 1, the smaller one first"
            )

    @property
    def place(self) -> str:
        """Cloud, region and zone, as far as they are known."""
        return "/".join(part for part in (self.cloud, self.region, self.zone) if part)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Where and what it is; rows of a file with the same one are duplicates."""
        return self.cloud, self.region, self.zone, self.instance_type


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that is not used."""

    line: int
    instance_type: str
    why: str

    def __str__(self) -> str:
        named = f" ({self.instance_type})" if self.instance_type else ""
        return f"line {self.line}{named}: {self.why}"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Offers, and the rows of the source that cannot be used."""

    offers: tuple[Offer, ...]  # that can be used, in the order in which they were read
    refusals: tuple[Refusal, ...]
    source: str  # where all that is from
    notes: tuple[str, ...] = ()  # what else was found, one sentence each

    def select(
        self,
        *,
        clouds: Iterable[str] = (),
        regions: Iterable[str] = (),
        types: Iterable[str] = (),
        accelerators: Iterable[str] = (),
    ) -> Catalogue:
        """Return the catalogue with those offers only; names are compared without regard to case.

        Each name must be in the catalogue. Whether an offer has all of them is another question,
        and the answer may be none.
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
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {_some(lower)}"
            raise ConfigError(f"no {what} of {self.source} is called {name!r}; {hint}")


def _some(names: Iterable[str]) -> str:
    all_names = list(names)
    more = len(all_names) - _MOST_NAMED
    rest = f" and {more} more" if more > 0 else ""
    return (", ".join(all_names[:_MOST_NAMED]) or "none at all") + rest


def price_interval(offer: Offer, on: date, *, spot: bool = False) -> Interval:
    """Return the price in dollars per hour, and between what it may lie on a day (95 %).

    - *On demand*, a list price falls by 15 % in a year at most, and rises by 5 %. That is an
      assumption between two facts: E2 machines of Google cost within 0.02 % what they did some
      three years before, and AWS cut its H100 machines by up to 45 % two years after they had come.
    - *A spot price* is off by 12 % at once, and by 39 % times the root of the years (of its
      logarithm, the two as independent). Measured: six recorded zones changed by up to 12 % within
      a week (standard deviation 6 %); five prices of V100 and E2 machines changed between -33 % and
      +100 % in two to three years (20 % in a year, growing with its root).
    - *Mixed dates.* A spot price that is estimated from a saving of another day has the error of
      the price on demand over the days in between, too.
    - Nobody need pay more for spot than on demand, so it ends there.
    - A price without a date is taken to be a year old.

    Args:
        offer: with its prices and their days.
        on: the day that is asked for; a price of a later day is as uncertain as one of an earlier.
        spot: whether the machine may be taken away.

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
            f"{offer.instance_type} in {offer.place or 'its place'} has no spot price; ask for "
            "the price on demand, or add one to the catalogue"
        )
    return offer.spot_usd_per_h


def _years(day: date | None, on: date) -> float:
    return _UNDATED_YEARS if day is None else abs((on - day).days) / _DAYS_OF_A_YEAR


def _between(offer: Offer) -> float:
    """Return the years between the two days that an estimated price is made of."""
    if offer.spot_kind != "estimated" or offer.spot_on is None:
        return 0.0
    return _years(offer.priced_on, offer.spot_on)


def price_label(offer: Offer, *, spot: bool = False) -> str:
    """Return the price as it is shown, with its day or days.

    Raises:
        ConfigError: there is no spot price.

    >>> price_label(Offer(instance_type="x", usd_per_h=3.06, priced_on=date(2022, 11, 22)))
    '3.06 USD/h (2022-11-22)'
    """
    if not spot:
        return f"{offer.usd_per_h:.4g} USD/h ({_day(offer.priced_on)})"
    value = _spot_usd_per_h(offer)
    told = _day(offer.spot_on)
    if offer.spot_kind == "estimated":
        told = f"estimated: price of {_day(offer.priced_on)}, saving of {told}"
    return f"{value:.4g} USD/h ({told})"


def _day(day: date | None) -> str:
    return "undated" if day is None else day.isoformat()


@dataclass(frozen=True, slots=True)
class Power:
    """What one worker's device can do at most."""

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
"""Peak of single precision and of the memory's bandwidth, one accelerator each, boards with two
processors as two.

Source:
    The makers' data sheets as public tables repeat them: T4, V100, A100 and H100 were read there;
    the others are from memory and not verified. Half-precision peaks are left out: they would make
    every newer card look further ahead than arithmetic alone does, and the error of a transfer
    covers it or not, as the workload happens to be.
"""

SHARED = ("t1.", "t2.", "t3.", "t3a.", "t4g.", "e2-micro", "e2-small", "e2-medium", "f1-", "g1-")
"""How the names of machines begin whose processors are theirs for a part of the time only."""


def power(offer: Offer) -> Power | None:
    """Return what one worker of a machine can do; ``None`` if it is not known.

    A machine without accelerators is one worker, in proportion to its virtual processors, unless it
    shares these. Such a power compares with its own kind only.
    """
    if offer.accelerator:
        return ACCELERATORS.get(offer.accelerator)
    if not offer.vcpus or offer.instance_type.startswith(SHARED):
        return None
    return Power(offer.vcpus, offer.vcpus, offer.memory_gib)


_NAMED = 8


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
        f"--regions together leave nothing. The types are in {', '.join(sorted(there))}, and the "
        f"regions have {', '.join(here[:_NAMED])}{more}; leave out one of the two, or change it"
    )
