"""Machines on offer and what they cost, with the date of every price.

A price is what it was on some day. How far it may be off today, `price_interval` says by rules that
are stated there; nothing here knows what day it is.
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
    """A type of machine in one place, and its prices.

    Args:
        instance_type: as the cloud names it.
        usd_per_h: price on demand in dollars per hour, above 0.
        cloud: that offers it, in lower case; empty if it is none.
        region: of the cloud.
        zone: of the region; empty if the price holds in all.
        accelerator: name of one; empty without any.
        accelerators: how many; a part of one is possible.
        vcpus: virtual processors; ``None`` if not known.
        memory_gib: in GiB; ``None`` if not known.
        spot_usd_per_h: price of a machine that may be taken away; ``None`` if there is none.
        spot_kind: whether that is ``"listed"`` by the cloud or ``"estimated"`` from the price on
            demand and a saving of another day; empty without a spot price.
        interruption: which part of such machines is taken away in a month, from and to, 0 to 1;
            ``None`` if not known.
        priced_on: day of the price on demand; ``None`` if not known.
        spot_on: that of the spot price, or of its saving.

    Raises:
        ConfigError: a price is not above 0, or the band is none.
    """

    instance_type: str
    usd_per_h: float
    cloud: str = ""
    region: str = ""
    zone: str = ""
    accelerator: str = ""
    accelerators: float = 0.0
    vcpus: float | None = None
    memory_gib: float | None = None
    spot_usd_per_h: float | None = None
    spot_kind: str = ""
    interruption: tuple[float, float] | None = None
    priced_on: date | None = None
    spot_on: date | None = None

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
    """What is on offer.

    Args:
        offers: that can be used, in the order in which they were read.
        refusals: rows that cannot.
        source: where all that is from.
        notes: what else was found, one sentence each.
    """

    offers: tuple[Offer, ...]
    refusals: tuple[Refusal, ...]
    source: str
    notes: tuple[str, ...] = ()

    def select(
        self,
        *,
        clouds: Iterable[str] = (),
        regions: Iterable[str] = (),
        types: Iterable[str] = (),
        accelerators: Iterable[str] = (),
    ) -> Catalogue:
        """Return the offers that are asked for; the rest of the catalogue stays.

        Names are compared without regard to case. Each must be in the catalogue; whether there is
        an offer with all of them is another question, and the answer may be none.

        Raises:
            ConfigError: a name is not in the catalogue; the message has the nearest ones.
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
    value, width = _spot_usd_per_h(offer), _spot_width(_years(offer.spot_on, on))
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


def _spot_width(years: float) -> float:
    return hypot(_SPOT_AT_ONCE, _SPOT_YEARLY * sqrt(years))


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
