"""Read a catalogue of machines and prices: a CSV file, as it is or packed, row by row.

A row is a line. What cannot be used is refused with its line and the reason, and the rest is used:
one bad price among thousands is no reason to plan without any.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TypeVar

from evenstride.errors import ConfigError
from evenstride.planner.catalogue.columns import (
    Columns,
    accelerators,
    amount,
    band,
    columns,
    day,
    kind,
    usd_per_h,
)
from evenstride.planner.catalogue.offers import Catalogue, Offer, Refusal

EXAMPLE = "InstanceType,Price\np3.2xlarge,3.06"
"""The smallest catalogue: a type, and its price in US dollars per hour."""

_SHIPPED = "us-offers.csv"
_LONGEST = 40  # characters of a cell that are shown
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
    """Return what a text in CSV offers.

    Lines that begin with ``#`` are comments. Which columns there may be, and how they are
    recognised: see docs/catalogue.md.

    Raises:
        ConfigError: a column that is needed is missing, or no row can be used.
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
    """Yield the lines that count, with their numbers."""
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
    """What is read so far: offers, refusals, and on which line each offer is."""

    def __init__(self, table: Columns, priced_on: date | None) -> None:
        self._table, self._priced_on = table, priced_on
        self._seen: dict[tuple[str, str, str, str], int] = {}
        self.offers: list[Offer] = []
        self.refusals: list[Refusal] = []

    def add(self, line: int, text: str) -> None:
        """Take a row, as an offer or as a refusal."""
        named = ""
        try:
            row = _Row(self._table, _cells(text))
            named = row.text("type")[:_LONGEST]
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
        """Return what is in a cell; nothing if there is no such column."""
        place = self.table.at.get(field)
        return "" if place is None else self.cells[place].strip()

    def read(self, field: str, reader: Callable[[str], _Value]) -> _Value | None:
        """Return what a cell means; nothing if it is empty."""
        text = self.text(field)
        if not text:
            return None
        try:
            return reader(text)
        except ValueError as error:
            name = self.table.names[self.table.at[field]]
            raise ValueError(f"{name} is {text[:_LONGEST]!r}: {error}") from None


def _offer(row: _Row, priced_on: date | None) -> Offer:
    """Return the offer of a row; raises a `ValueError` with what is wrong with it."""
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
