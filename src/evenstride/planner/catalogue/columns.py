"""What stands in a price table: which column is which, and what its cells mean.

Units belong to what is read. A price is in dollars per hour; one in anything else is refused rather
than converted, as nothing here knows an exchange rate, or how long a month is to somebody.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from math import inf

from evenstride.errors import ConfigError

_NAMES: dict[str, tuple[str, ...]] = {
    "type": ("instancetype", "type", "instance", "machinetype", "instancename", "vmsize"),
    "price": ("price", "ondemandprice", "ondemand", "cost", "listprice", "rate"),
    "cloud": ("cloud", "provider"),
    "region": ("region", "location"),
    "zone": ("zone", "availabilityzone", "az"),
    "accelerator": ("acceleratorname", "accelerator", "gpu", "gpuname"),
    "accelerators": ("acceleratorcount", "accelerators", "gpus", "gpucount"),
    "vcpus": ("vcpus", "vcpu", "cpus", "cpu", "cores"),
    "memory": ("memory", "ram", "mem"),
    "spot_price": ("spotprice", "spot", "preemptibleprice"),
    "spot_kind": ("spotpricekind", "spotkind"),
    "interruption": ("interruptionband", "interruption", "interruptions"),
    "priced_on": ("pricedate", "date", "pricedon"),
    "spot_on": ("spotdate", "spoton"),
    "": ("spotsavingspct", "spotsavings"),  # the spot price says the same
}
_FIELDS = {name: field for field, names in _NAMES.items() for name in names}
_NEEDED = {"type": "InstanceType", "price": "Price"}

_DOLLARS, _HOURS = {"usd", "$", "dollar", "dollars"}, {"h", "hr", "hour", "hours", "hourly"}
_OTHER_MONEY = {
    "eur",
    "euro",
    "euros",
    "€",
    "gbp",
    "pound",
    "pounds",
    "£",
    "jpy",
    "yen",
    "cny",
    "¥",
}
_OTHER_MONEY |= {"rmb", "inr", "chf", "cad", "aud", "cent", "cents"}
_OTHER_TIMES = {"month", "months", "monthly", "mo", "week", "weekly", "year", "years", "yearly"}
_OTHER_TIMES |= {
    "annual",
    "day",
    "days",
    "daily",
    "minute",
    "minutes",
    "min",
    "second",
    "seconds",
    "s",
}
_GIB = {"gib": 1.0, "gb": 1e9 / 2**30, "mib": 2.0**-10, "mb": 1e6 / 2**30}

_WORD = re.compile(r"[KMGT]i?B(?![a-z])|[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[$€£¥]")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_PRICE = re.compile(rf"(?P<before>[^\d.,+-]*)(?P<number>{_NUMBER.pattern})(?P<after>.*)")
_BAND = re.compile(
    r"(?P<sign>[<>])?\s*(?P<low>\d+(?:\.\d+)?)\s*%?(?:\s*-\s*(?P<high>\d+(?:\.\d+)?))?\s*%"
)
_LONGEST = 30  # characters of a cell that are shown
_MOST_ACCELERATORS = 64  # of a machine; the largest have 16


@dataclass(frozen=True, slots=True)
class Columns:
    """Which column is which."""

    names: tuple[str, ...]
    at: dict[str, int]
    memory_gib: float
    notes: tuple[str, ...]


def columns(header: Sequence[str]) -> Columns:
    """Return what the columns of a table are, by their names and the units in these.

    Raises:
        ConfigError: one that is needed is missing, there twice, or in a unit that is not used here.
    """
    at: dict[str, int] = {}
    unknown, memory_gib = [], 1.0
    for place, name in enumerate(header):
        words = [word.lower() for word in _WORD.findall(name)]
        field = _field(name, words)
        if field is None:
            unknown.append(name.strip())
        elif field in at:
            raise ConfigError(
                f"the columns {header[at[field]]!r} and {name!r} both give the {field}; keep one"
            )
        elif field:
            at[field] = place
        if field == "memory":
            memory_gib = next((_GIB[word] for word in words if word in _GIB), 1.0)
    for field, example in _NEEDED.items():
        if field not in at:
            raise ConfigError(_missing(field, example, header))
    notes = (f"not used: {', '.join(map(repr, unknown))}",) if unknown else ()
    return Columns(tuple(name.strip() for name in header), at, memory_gib, notes)


def _field(name: str, words: list[str]) -> str | None:
    """Return which field a column is; nothing if none."""
    units = _DOLLARS | _HOURS | {"per"} | _GIB.keys()
    base = "".join(word for word in words if word not in units)
    if not base and _DOLLARS & set(words):
        return "price"
    if base in _FIELDS:
        return _FIELDS[base]
    other = [word for word in words if word in _OTHER_MONEY | _OTHER_TIMES]
    bare = "".join(word for word in words if word not in units | _OTHER_MONEY | _OTHER_TIMES)
    money = not bare and (_DOLLARS | _OTHER_MONEY) & set(words)
    if other and (money or _FIELDS.get(bare) in ("price", "spot_price")):
        raise ConfigError(
            f"the column {name!r} is in {' '.join(other)}: prices are in US dollars per hour; "
            "convert them, and call the column Price (USD/h)"
        )
    return None


def _missing(field: str, example: str, header: Sequence[str]) -> str:
    told = ", ".join(repr(name.strip()[:_LONGEST]) for name in header[:20])
    if len(header) == 1 and re.search(r"[;\t|]", header[0]):
        return f"the header {told} is one column: separate columns by commas"
    lower = {name.strip().lower(): name.strip() for name in header}
    near = [n for alias in (field, *_NAMES[field]) for n in get_close_matches(alias, lower, n=1)]
    hint = f"is {lower[near[0]]!r} meant to be it? Call it" if near else "give it, and call it"
    return f"no column for the {field} among {told}; {hint} {example}"


def usd_per_h(text: str) -> float:
    """Return a price in dollars per hour.

    Raises:
        ValueError: it is none, with what is wrong.

    >>> usd_per_h("3.06"), usd_per_h("$0.5/h"), usd_per_h("12 USD per hour")
    (3.06, 0.5, 12.0)
    """
    found = _PRICE.fullmatch(text)
    if found is None:
        raise ValueError("it is no number; a price is like 3.06, in US dollars per hour")
    if found["after"].startswith(","):
        raise ValueError("a number has a decimal point and no comma, like 3.06")
    if re.search(r"\d", found["after"]):
        raise ValueError("it is no number; a price is like 3.06, in US dollars per hour")
    _check_units(found["before"] + " " + found["after"])
    value = float(found["number"])
    if not 0.0 < value < inf:
        raise ValueError("a price is above 0 and finite; leave the row out if it is not known")
    return value


def _check_units(text: str) -> None:
    if not text.strip():
        return
    words = {word.lower() for word in re.findall(r"[A-Za-z]+|[^\sA-Za-z/.]", text)}
    if words - _DOLLARS - _HOURS - {"per"}:
        raise ValueError(f"{text.strip()!r} is another unit than US dollars per hour (USD/h)")


def amount(text: str) -> float:
    """Return a number of at least 0.

    Raises:
        ValueError: it is none, with what is wrong.
    """
    if not _NUMBER.fullmatch(text):
        raise ValueError("it is no number; units belong into the column's name")
    value = float(text)
    if not 0.0 <= value < inf:
        raise ValueError("it has to be at least 0 and finite")
    return value


def accelerators(text: str) -> float:
    """Return how many accelerators a machine has; a part of one is possible.

    Raises:
        ValueError: it is no number, or more than any machine has.
    """
    value = amount(text)
    if value > _MOST_ACCELERATORS:
        raise ValueError(f"a machine has {_MOST_ACCELERATORS} accelerators at most")
    return value


def day(text: str) -> date:
    """Return a date.

    Raises:
        ValueError: it is none.
    """
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError("it is no date; one is written 2025-06-28") from None


def band(text: str) -> tuple[float, float]:
    """Return which part of machines is taken away in a month, from and to.

    Raises:
        ValueError: it is none.

    >>> band("<5%"), band("10-15%"), band(">20%"), band("7 %")
    ((0.0, 0.05), (0.1, 0.15), (0.2, 1.0), (0.07, 0.07))
    """
    found = _BAND.fullmatch(text)
    if found is None or (found["sign"] and found["high"]):
        raise ValueError("it is no band; one is written <5%, 5-10% or >20% (of a month)")
    first = float(found["low"]) / 100.0
    low = 0.0 if found["sign"] == "<" else first
    high = 1.0 if found["sign"] == ">" else float(found["high"] or found["low"]) / 100.0
    if not low <= high <= 1.0 or low == 1.0:
        raise ValueError("a band goes from a part below 100 % to a larger one, 100 % at most")
    return low, high


def kind(text: str) -> str:
    """Return what a spot price is.

    Raises:
        ValueError: neither is meant.
    """
    if text.lower() not in ("listed", "estimated"):
        raise ValueError("a spot price is listed or estimated")
    return text.lower()
