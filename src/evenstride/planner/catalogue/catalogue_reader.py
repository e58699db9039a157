"""Read a catalogue of machines and prices: a CSV file, as it is or packed, row by row.

A row that cannot be used is refused with its line and the reason, and the rest is used: one bad
price among thousands is no reason to plan without any. Units belong to what is read. A price in
anything but dollars per hour is refused rather than converted, as nothing here knows an exchange
rate, or how long a month is to somebody.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from functools import lru_cache
from importlib import resources
from math import inf
from pathlib import Path
from typing import TypeVar

from evenstride.errors import ConfigError
from evenstride.planner.catalogue.offers import Catalogue, Offer, Refusal

EXAMPLE = "InstanceType,Price\np3.2xlarge,3.06"
"""The smallest catalogue: a type, and its price in US dollars per hour."""

_SHIPPED = "us-offers.csv"
_LONGEST_CELL = 40  # characters of a cell that are shown
_TOLD = 3  # refusals in an error
_Value = TypeVar("_Value")


def read_catalogue(path: Path, priced_on: date | None = None) -> Catalogue:
    """Return what a file offers.

    Args:
        path: of a CSV file in UTF-8, or of one that gzip has packed.
        priced_on: day of the prices that have none of their own.

    Raises:
        ConfigError: it cannot be read, lacks a column, or has no row that can be used.

    Cost:
        one pass; a second for a hundred thousand rows.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except UnicodeDecodeError:
        problem = "it is not UTF-8 text; save it as CSV in UTF-8"
    except (EOFError, zlib.error, gzip.BadGzipFile):
        problem = "it is packed, and damaged; fetch it anew"
    except OSError as error:
        problem = f"{error.strerror or error}; name a file that can be read"
    else:
        return parse_catalogue(text, str(path), priced_on)
    raise ConfigError(f"the catalogue {path} cannot be read: {problem}")


@lru_cache
def shipped_catalogue() -> Catalogue:
    """Return the small one that comes with the package: some types in regions of the US.

    Its prices are those of the days they have; see the README beside it for where they are from.
    """
    file = resources.files("evenstride.planner") / "data" / _SHIPPED
    return parse_catalogue(file.read_text(encoding="utf-8"), "the shipped catalogue")


def parse_catalogue(text: str, source: str, priced_on: date | None = None) -> Catalogue:
    """Return what a text in CSV offers; lines that begin with ``#`` are comments.

    docs/reference/catalogue.md lists the columns there may be, and how they are recognised.
    """
    lines = _lines(text)
    first, header = next(lines, (1, ""))
    try:
        table = columns(_cells(header))
    except ValueError as error:
        told = f"{source}:{first}: {error}" if header else f"{source} is empty"
        raise ConfigError(f"{told}. A catalogue looks like\n{EXAMPLE}") from None
    rows = _Rows(table, priced_on)
    for line, row in lines:
        rows.add(line, row)
    if not rows.offers:
        raise ConfigError(_unusable(source, rows.refusals))
    return Catalogue(tuple(rows.offers), tuple(rows.refusals), source, table.notes)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), start=1):
        if line.strip() and not line.startswith("#"):
            yield number, line


def _cells(line: str) -> list[str]:
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error:
        raise ValueError("a quote in it is not closed, or stands beside a text") from None


class _Rows:
    """The offers and refusals so far, and on which line each offer is."""

    def __init__(self, table: Columns, priced_on: date | None) -> None:
        self._table, self._priced_on = table, priced_on
        self._seen: dict[tuple[str, str, str, str], int] = {}
        self.offers: list[Offer] = []
        self.refusals: list[Refusal] = []

    def add(self, line: int, text: str) -> None:
        named = ""
        try:
            row = _Row(self._table, _cells(text))
            named = row.text("type")[:_LONGEST_CELL]
            offer = _offer(row, self._priced_on)
            self._check_new(offer)
        except ValueError as error:
            self.refusals.append(Refusal(line, named, str(error)))
        else:
            self._seen[offer.key] = line
            self.offers.append(offer)

    def _check_new(self, offer: Offer) -> None:
        if offer.key in self._seen:
            where = f"in {offer.place}" if offer.place else "in the same place"
            raise ValueError(
                f"it is in the catalogue already, {where}, on line {self._seen[offer.key]}, which "
                "is used; keep one of them"
            )


@dataclass(frozen=True, slots=True)
class _Row:
    """The cells of a row, by what they are."""

    table: Columns
    cells: list[str]

    def __post_init__(self) -> None:
        has, should = len(self.cells), len(self.table.names)
        if has != should:
            raise ValueError(
                f"it has {has} cells and the header {should}; a number has a decimal point and no "
                "comma, and a text with a comma in it is quoted"
            )

    def text(self, field: str) -> str:
        """Return what is in a cell; empty if there is no such column."""
        place = self.table.at.get(field)
        return "" if place is None else self.cells[place].strip()

    def read(self, field: str, reader: Callable[[str], _Value]) -> _Value | None:
        """Return what a cell means; ``None`` if it is empty."""
        text = self.text(field)
        if not text:
            return None
        try:
            return reader(text)
        except ValueError as error:
            name = self.table.names[self.table.at[field]]
            raise ValueError(f"{name} is {text[:_LONGEST_CELL]!r}: {error}") from None


def _offer(row: _Row, priced_on: date | None) -> Offer:
    price, spot = row.read("price", usd_per_h), row.read("spot_price", usd_per_h)
    if not row.text("type"):
        raise ValueError("it has no type; give the name that the cloud has for it")
    if price is None:
        raise ValueError("it has no price; leave it out, or look it up")
    priced_on = row.read("priced_on", day) or priced_on
    spot_kind, spot_on = row.read("spot_kind", kind), row.read("spot_on", day)
    memory, count = row.read("memory", amount), row.read("accelerators", accelerators)
    accelerator = row.text("accelerator")
    return Offer(
        instance_type=row.text("type"),
        usd_per_h=price,
        cloud=row.text("cloud").lower(),
        region=row.text("region"),
        zone=row.text("zone"),
        accelerator=accelerator,
        accelerators=float(bool(accelerator)) if count is None else count,
        vcpus=row.read("vcpus", amount),
        memory_gib=None if memory is None else memory * row.table.memory_gib,
        spot_usd_per_h=spot,
        spot_kind="" if spot is None else spot_kind or "listed",
        interruption=row.read("interruption", band),
        priced_on=priced_on,
        spot_on=None if spot is None else spot_on or priced_on,
    )


def _unusable(source: str, refusals: list[Refusal]) -> str:
    if not refusals:
        return f"{source} has a header and no rows. A catalogue looks like\n{EXAMPLE}"
    told = "; ".join(map(str, refusals[:_TOLD]))
    more = f"; and {len(refusals) - _TOLD} more" if len(refusals) > _TOLD else ""
    count = "its only row cannot" if len(refusals) == 1 else f"none of its {len(refusals)} rows can"
    return f"{source}: {count} be used: {told}{more}. A catalogue looks like\n{EXAMPLE}"


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
_OTHER_MONEY = {"eur", "euro", "euros", "€", "gbp", "pound", "pounds", "£", "jpy", "yen", "cny"}
_OTHER_MONEY |= {"¥", "rmb", "inr", "chf", "cad", "aud", "cent", "cents"}
_OTHER_TIMES = {"month", "months", "monthly", "mo", "week", "weekly", "year", "years", "yearly"}
_OTHER_TIMES |= {"annual", "day", "days", "daily", "minute", "minutes", "min", "s", "second"}
_OTHER_TIMES |= {"seconds"}
_GIB = {"gib": 1.0, "gb": 1e9 / 2**30, "mib": 2.0**-10, "mb": 1e6 / 2**30}

_WORD = re.compile(r"[KMGT]i?B(?![a-z])|[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[$€£¥]")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_PRICE = re.compile(rf"(?P<before>[^\d.,+-]*)(?P<number>{_NUMBER.pattern})(?P<after>.*)")
_BAND = re.compile(
    r"(?P<sign>[<>])?\s*(?P<low>\d+(?:\.\d+)?)\s*%?(?:\s*-\s*(?P<high>\d+(?:\.\d+)?))?\s*%"
)
_LONGEST_NAME = 30  # characters of a cell that are shown
_MOST_ACCELERATORS = 64  # of a machine; the largest have 16


@dataclass(frozen=True, slots=True)
class Columns:
    """Which column is which."""

    names: tuple[str, ...]
    at: dict[str, int]
    memory_gib: float
    notes: tuple[str, ...]


def columns(header: Sequence[str]) -> Columns:
    """Return what the columns of a table are, by their names and the units in these."""
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
    """Return which field a column is: empty for one to skip, ``None`` for an unknown one."""
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
    told = ", ".join(repr(name.strip()[:_LONGEST_NAME]) for name in header[:20])
    if len(header) == 1 and re.search(r"[;\t|]", header[0]):
        return f"the header {told} is one column: separate columns by commas"
    lower = {name.strip().lower(): name.strip() for name in header}
    near = [n for alias in (field, *_NAMES[field]) for n in get_close_matches(alias, lower, n=1)]
    hint = f"is {lower[near[0]]!r} meant to be it? Call it" if near else "give it, and call it"
    return f"no column for the {field} among {told}; {hint} {example}"


def usd_per_h(text: str) -> float:
    """Return a price in dollars per hour; raises a `ValueError` that says what is wrong.

    >>> usd_per_h("3.06"), usd_per_h("$0.5/h"), usd_per_h("12 USD per hour")
    (3.06, 0.5, 12.0)
    """
    found = _PRICE.fullmatch(text)
    if found and found["after"].startswith(","):
        raise ValueError("a number has a decimal point and no comma, like 3.06")
    if found is None or re.search(r"\d", found["after"]):
        raise ValueError("it is no number; a price is like 3.06, in US dollars per hour")
    _check_units(found["before"] + " " + found["after"])
    value = float(found["number"])
    if not 0.0 < value < inf:
        raise ValueError("a price is above 0 and finite; leave the row out if it is not known")
    return value


def _check_units(text: str) -> None:
    words = {word.lower() for word in re.findall(r"[A-Za-z]+|[^\sA-Za-z/.]", text)}
    if words - _DOLLARS - _HOURS - {"per"}:
        raise ValueError(f"{text.strip()!r} is another unit than US dollars per hour (USD/h)")


def amount(text: str) -> float:
    """Return a number of at least 0, or raise a `ValueError`."""
    if not _NUMBER.fullmatch(text):
        raise ValueError("it is no number; units belong into the column's name")
    value = float(text)
    if not 0.0 <= value < inf:
        raise ValueError("it has to be at least 0 and finite")
    return value


def accelerators(text: str) -> float:
    """Return how many accelerators a machine has, or raise a `ValueError`; parts are possible."""
    value = amount(text)
    if value > _MOST_ACCELERATORS:
        raise ValueError(f"a machine has {_MOST_ACCELERATORS} accelerators at most")
    return value


def day(text: str) -> date:
    """Return a date, or raise a `ValueError`."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError("it is no date; one is written 2025-06-28") from None


def band(text: str) -> tuple[float, float]:
    """Return which part of machines is taken away in a month, from and to, or raise a `ValueError`.

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
    """Return what a spot price is, listed or estimated, or raise a `ValueError`."""
    if text.lower() not in ("listed", "estimated"):
        raise ValueError("a spot price is listed or estimated")
    return text.lower()
