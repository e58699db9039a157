"""Read a catalogue of machines and prices: a CSV file, plain or gzipped, row by row.

An invalid row is rejected with its line and the reason, and the others are used: one invalid
price among thousands does not prevent a plan. Units are part of the data. A price that is not in
dollars per hour is rejected rather than converted, because the reader knows no exchange rates and
no length of a month.
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
_LONGEST_CELL = 40  # characters of a cell to show
_SHOWN = 3  # rejected rows in an error
_Value = TypeVar("_Value")


def read_catalogue(path: Path, priced_on: date | None = None) -> Catalogue:
    """Return the offers of a file.

    Args:
        path: of a CSV file in UTF-8, plain or gzipped.
        priced_on: date of prices without a date of their own.

    Raises:
        ConfigError: the file cannot be read, lacks a column, or has no valid row.

    Cost:
        One pass; 1 s for a hundred thousand rows.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except UnicodeDecodeError:
        problem = "it is not UTF-8 text; save it as CSV in UTF-8"
    except (EOFError, zlib.error, gzip.BadGzipFile):
        problem = "the gzip file is damaged; download it again"
    except OSError as error:
        problem = f"{error.strerror or error}; give a readable file"
    else:
        return parse_catalogue(text, str(path), priced_on)
    raise ConfigError(f"cannot read the catalogue {path}: {problem}")


@lru_cache
def shipped_catalogue() -> Catalogue:
    """Return the small catalogue of the package: some types in regions of the US.

    Its prices have dates; the README in its folder names their sources.
    """
    file = resources.files("evenstride.planner") / "data" / _SHIPPED
    return parse_catalogue(file.read_text(encoding="utf-8"), "the shipped catalogue")


def parse_catalogue(text: str, source: str, priced_on: date | None = None) -> Catalogue:
    """Return the offers of a CSV text; lines that begin with ``#`` are comments.

    docs/reference/catalogue.md lists the possible columns, and how they are recognised.
    """
    lines = _lines(text)
    first, header = next(lines, (1, ""))
    try:
        table = columns(_cells(header))
    except ValueError as error:
        problem = f"{source}:{first}: {error}" if header else f"{source} is empty"
        raise ConfigError(f"{problem}. A catalogue looks like this:\n{EXAMPLE}") from None
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
        raise ValueError("a quoted text is not closed, or has text after it") from None


class _Rows:
    """The offers and rejected rows so far, and the line of each offer."""

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
                f"it is a duplicate of line {self._seen[offer.key]}, {where}, which is used; keep "
                "one of them"
            )


@dataclass(frozen=True, slots=True)
class _Row:
    """The cells of a row, by field."""

    table: Columns
    cells: list[str]

    def __post_init__(self) -> None:
        has, should = len(self.cells), len(self.table.names)
        if has != should:
            raise ValueError(
                f"it has {has} cells, but the header has {should}; write numbers with a decimal "
                "point and no comma, and quote a text with a comma"
            )

    def text(self, field: str) -> str:
        """Return the text of a cell; empty if there is no such column."""
        place = self.table.at.get(field)
        return "" if place is None else self.cells[place].strip()

    def read(self, field: str, reader: Callable[[str], _Value]) -> _Value | None:
        """Return the value of a cell; ``None`` if it is empty."""
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
        raise ValueError("it has no type; give the cloud's name of it")
    if price is None:
        raise ValueError("it has no price; add the price, or leave the row out")
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
        return f"{source} has a header but no rows. A catalogue looks like this:\n{EXAMPLE}"
    shown = "; ".join(map(str, refusals[:_SHOWN]))
    more = f"; and {len(refusals) - _SHOWN} more" if len(refusals) > _SHOWN else ""
    count = "its only row is" if len(refusals) == 1 else f"all of its {len(refusals)} rows are"
    return f"{source}: {count} invalid: {shown}{more}. A catalogue looks like this:\n{EXAMPLE}"


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
    "": ("spotsavingspct", "spotsavings"),  # the spot price contains this already
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
_LONGEST_NAME = 30  # characters of a column's name to show
_MOST_ACCELERATORS = 64  # of a machine; the largest have 16


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a table, by field."""

    names: tuple[str, ...]
    at: dict[str, int]
    memory_gib: float
    notes: tuple[str, ...]


def columns(header: Sequence[str]) -> Columns:
    """Return the fields of a table's columns, from their names and the units in them."""
    at: dict[str, int] = {}
    unknown, memory_gib = [], 1.0
    for place, name in enumerate(header):
        words = [word.lower() for word in _WORD.findall(name)]
        field = _field(name, words)
        if field is None:
            unknown.append(name.strip())
        elif field in at:
            raise ConfigError(
                f"the columns {header[at[field]]!r} and {name!r} both hold the {field}; keep one"
            )
        elif field:
            at[field] = place
        if field == "memory":
            memory_gib = next((_GIB[word] for word in words if word in _GIB), 1.0)
    for field, example in _NEEDED.items():
        if field not in at:
            raise ConfigError(_missing(field, example, header))
    notes = (f"ignored: {', '.join(map(repr, unknown))}",) if unknown else ()
    return Columns(tuple(name.strip() for name in header), at, memory_gib, notes)


def _field(name: str, words: list[str]) -> str | None:
    """Return the field of a column: empty for one to skip, ``None`` for an unknown one."""
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
            f"the column {name!r} is in {' '.join(other)}, but prices must be in US dollars per "
            "hour; convert them, and name the column Price (USD/h)"
        )
    return None


def _missing(field: str, example: str, header: Sequence[str]) -> str:
    shown = ", ".join(repr(name.strip()[:_LONGEST_NAME]) for name in header[:20])
    if len(header) == 1 and re.search(r"[;\t|]", header[0]):
        return f"the header {shown} is one column: separate columns by commas"
    lower = {name.strip().lower(): name.strip() for name in header}
    near = [n for alias in (field, *_NAMES[field]) for n in get_close_matches(alias, lower, n=1)]
    hint = f"if it is {lower[near[0]]!r}, rename it to" if near else "add a column named"
    return f"no column for the {field} among {shown}; {hint} {example}"


def usd_per_h(text: str) -> float:
    """Return a price in dollars per hour; raises a `ValueError` with the reason if it is invalid.

    >>> usd_per_h("3.06"), usd_per_h("$0.5/h"), usd_per_h("12 USD per hour")
    (3.06, 0.5, 12.0)
    """
    found = _PRICE.fullmatch(text)
    if found and found["after"].startswith(","):
        raise ValueError("expected a decimal point and no comma, such as 3.06")
    if found is None or re.search(r"\d", found["after"]):
        raise ValueError("expected a number such as 3.06, in US dollars per hour")
    _check_units(found["before"] + " " + found["after"])
    value = float(found["number"])
    if not 0.0 < value < inf:
        raise ValueError("expected a finite price above 0; leave the row out if it is not known")
    return value


def _check_units(text: str) -> None:
    words = {word.lower() for word in re.findall(r"[A-Za-z]+|[^\sA-Za-z/.]", text)}
    if words - _DOLLARS - _HOURS - {"per"}:
        raise ValueError(f"{text.strip()!r} is not US dollars per hour (USD/h)")


def amount(text: str) -> float:
    """Return a number of at least 0, or raise a `ValueError`."""
    if not _NUMBER.fullmatch(text):
        raise ValueError("expected a number; put units into the column's name")
    value = float(text)
    if not 0.0 <= value < inf:
        raise ValueError("expected a finite number of at least 0")
    return value


def accelerators(text: str) -> float:
    """Return a machine's number of accelerators, possibly fractional, or raise a `ValueError`."""
    value = amount(text)
    if value > _MOST_ACCELERATORS:
        raise ValueError(f"expected at most {_MOST_ACCELERATORS} accelerators per machine")
    return value


def day(text: str) -> date:
    """Return a date, or raise a `ValueError`."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError("expected a date such as 2025-06-28") from None


def band(text: str) -> tuple[float, float]:
    """Return the range of the fraction of machines preempted in a month, or raise a `ValueError`.

    >>> band("<5%"), band("10-15%"), band(">20%"), band("7 %")
    ((0.0, 0.05), (0.1, 0.15), (0.2, 1.0), (0.07, 0.07))
    """
    found = _BAND.fullmatch(text)
    if found is None or (found["sign"] and found["high"]):
        raise ValueError("expected a band such as <5%, 5-10% or >20% (per month)")
    first = float(found["low"]) / 100.0
    low = 0.0 if found["sign"] == "<" else first
    high = 1.0 if found["sign"] == ">" else float(found["high"] or found["low"]) / 100.0
    if not low <= high <= 1.0 or low == 1.0:
        raise ValueError("expected a band from below 100 % to a larger value of at most 100 %")
    return low, high


def kind(text: str) -> str:
    """Return the kind of a spot price, listed or estimated, or raise a `ValueError`."""
    if text.lower() not in ("listed", "estimated"):
        raise ValueError("expected listed or estimated")
    return text.lower()
