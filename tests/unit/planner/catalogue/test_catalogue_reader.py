"""Catalogues: what a file may look like, and that one bad row is no reason to lose the others."""

from __future__ import annotations

import gzip
from datetime import date
from pathlib import Path

import pytest

from evenstride.errors import ConfigError
from evenstride.planner.catalogue.catalogue_reader import (
    parse_catalogue,
    read_catalogue,
    shipped_catalogue,
)
from evenstride.planner.catalogue.offers import Catalogue, Offer
from tests.messages import check_message, raises_message

HEADER = (
    "Cloud,Region,InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,"
    "SpotPriceKind,SpotSavingsPct,InterruptionBand,PriceDate,SpotDate"
)
ROW = "aws,us-east-1,p3.2xlarge,V100,1,8.0,61.0,3.06,0.612,estimated,80,>20%,2022-11-22,2025-06-28"
V100 = Offer(
    cloud="aws",
    region="us-east-1",
    instance_type="p3.2xlarge",
    accelerator="V100",
    accelerators=1.0,
    vcpus=8.0,
    memory_gib=61.0,
    usd_per_h=3.06,
    spot_usd_per_h=0.612,
    spot_kind="estimated",
    interruption=(0.2, 1.0),
    priced_on=date(2022, 11, 22),
    spot_on=date(2025, 6, 28),
)


def read(*lines: str) -> Catalogue:
    return parse_catalogue("\n".join(lines), "prices.csv")


def reported(*lines: str) -> list[str]:
    return [str(refusal) for refusal in read(*lines).refusals]


def test_every_column_is_read() -> None:
    found = read(HEADER, ROW)

    assert found.offers == (V100,)
    assert found.refusals == ()
    assert found.notes == ()
    assert found.source == "prices.csv"


def test_type_and_price_are_enough() -> None:
    found = read("type,price", "mine,0.5", "other,2")

    assert found.offers == (
        Offer(instance_type="mine", usd_per_h=0.5),
        Offer(instance_type="other", usd_per_h=2.0),
    )


@pytest.mark.parametrize(
    "header",
    [
        "Instance Type,USD/h",
        "instance_type,price_usd_per_hour",
        "machine-type,Price ($/hr)",
        "vmSize,hourlyPriceUSD",
        " TYPE , On-demand price [USD per h] ",
        '"type","cost, USD/h"',
    ],
)
def test_columns_are_known_by_several_names_with_units(header: str) -> None:
    assert read(header, "mine,0.5").offers == (Offer(instance_type="mine", usd_per_h=0.5),)


@pytest.mark.parametrize(
    ("column", "gib"),
    [("ram", 16.0), ("mem_gib", 16.0), ("Memory (GB)", 14.9012), ("RAM MiB", 2**-6)],
)
def test_memory_is_converted(column: str, gib: float) -> None:
    (offer,) = read(f"type,price,{column}", "mine,0.5,16").offers

    assert offer.memory_gib == pytest.approx(gib, rel=1e-5)


@pytest.mark.parametrize(
    "cell", ["0.5", "$0.5", "0.5 USD", "0.5 USD/h", "$ 0.5 per hour", ".5", "5e-1"]
)
def test_a_price_may_have_the_unit_that_is_meant(cell: str) -> None:
    (offer,) = read("type,price", f"mine,{cell}").offers

    assert offer.usd_per_h == 0.5


def test_unknown_columns_are_reported_and_not_used() -> None:
    found = read("type,GpuInfo,price,Comment", "mine,x,0.5,y")

    assert len(found.offers) == 1
    assert found.notes == ("ignored: 'GpuInfo', 'Comment'",)


def test_a_spot_price_alone_is_listed_and_of_the_same_day() -> None:
    (offer,) = read("type,price,spot_usd_per_h,date", "mine,2,0.5,2026-01-31").offers

    assert (offer.spot_usd_per_h, offer.spot_kind) == (0.5, "listed")
    assert offer.spot_on == offer.priced_on == date(2026, 1, 31)


def test_prices_without_a_day_get_the_one_of_the_file() -> None:
    text = "type,price,date\nold,1,2020-01-01\nnew,1,"

    found = parse_catalogue(text, "prices.csv", date(2026, 8, 1))

    assert [offer.priced_on for offer in found.offers] == [date(2020, 1, 1), date(2026, 8, 1)]


def test_an_accelerator_without_a_number_is_one() -> None:
    found = read("type,gpu,gpus,price", "one,T4,,1", "part,A10,0.5,1", "none,,,1")

    assert [offer.accelerators for offer in found.offers] == [1.0, 0.5, 0.0]


BAD_CELLS = {
    "": "it has no price",
    "-3.06": "Price is '-3.06': expected a finite price above 0",
    "0": "Price is '0': expected a finite price above 0",
    "1e999": "expected a finite price above 0",
    "nan": "expected a number",
    "free": "expected a number such as 3.06, in US dollars",
    "3.06.1": "expected a number",
    "0.5 EUR": "'EUR' is not US dollars per hour",
    "0.5€": "'€' is not US dollars per hour",
    "12 $/month": "is not US dollars per hour",
    '"3,06"': "expected a decimal point and no comma",
    '"1,200.50"': "expected a decimal point and no comma",
}


@pytest.mark.parametrize("cell", BAD_CELLS)
def test_a_bad_price_is_refused_with_its_line_and_the_rest_is_used(cell: str) -> None:
    lines = ("InstanceType,Price", "good,1", f"bad,{cell}", "fine,2")

    assert [offer.instance_type for offer in read(*lines).offers] == ["good", "fine"]
    (refusal,) = reported(*lines)
    assert refusal.startswith("line 3 (bad): ")
    assert BAD_CELLS[cell] in refusal


BAD_ROWS = {
    "bad,3,06,,,": "it has 6 cells, but the header has 5; write numbers with a decimal point",
    "bad,3": "it has 2 cells",
    ",3,,,": "it has no type",
    'bad,"3,,,': "a quoted text is not closed",
    "bad,3,12 GB,,": "memory is '12 GB': expected a number; put units into the column's name",
    "bad,3,-1,,": "expected a finite number of at least 0",
    "bad,3,,often,": "expected a band such as <5%, 5-10% or >20%",
    "bad,3,,10-5%,": "expected a band from below 100 % to a larger value of at most 100 %",
    "bad,3,,90-120%,": "expected a band from below 100 % to a larger value of at most 100 %",
    "bad,3,,0.07,": "expected a band",
    "bad,3,,,yesterday": "date is 'yesterday': expected a date such as 2025-06-28",
}


@pytest.mark.parametrize("row", BAD_ROWS)
def test_a_bad_row_is_refused_with_its_line_and_the_rest_is_used(row: str) -> None:
    lines = ("type,price,memory,interruption,date", "good,1,,,", row, "fine,2,,,")

    assert [offer.instance_type for offer in read(*lines).offers] == ["good", "fine"]
    (refusal,) = reported(*lines)
    assert refusal.startswith("line 3")
    assert BAD_ROWS[row] in refusal


def test_of_duplicates_the_first_is_used_and_named() -> None:
    lines = (
        "cloud,region,zone,type,price",
        "aws,us-east-1,,m5.large,0.096",
        "AWS,us-east-1,,m5.large,0.1",
        "aws,us-east-1,us-east-1a,m5.large,0.097",
        "aws,us-west-2,,m5.large,0.098",
        "aws,us-east-1,,m5.large,0.096",
    )

    assert [offer.usd_per_h for offer in read(*lines).offers] == [0.096, 0.097, 0.098]
    check_message(reported(*lines), "line 3", "line 6", "aws/us-east-1", "line 2")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=repr)
def test_lines_are_counted_as_an_editor_counts_them(end: str) -> None:
    text = end.join(["# prices", "", "type,price", "# more", "  ", "good,1", "bad,-1", ""])

    (refusal,) = parse_catalogue(text, "prices.csv").refusals

    assert refusal.line == 7


BAD_HEADERS = [
    "Instnce,Price",
    "InstanceType,Prise",
    "a,b",
    "type;price",
    "type,price_eur",
    "type,USD per month",
    "type,price,spot €/h",
    "type,price,usd_per_h",
    '"type,price',
]


@pytest.mark.parametrize("header", BAD_HEADERS)
def test_an_incomplete_header_is_refused_with_the_nearest_column(header: str) -> None:
    with raises_message(ConfigError):
        read(header, "mine,1")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([""], ("InstanceType",)),
        (["# nothing"], ()),
        (["type,price"], ()),
        (["type,price", "a,-1"], ("line 2", "'-1'")),
        (
            ["type,price", *["a,x"] * 5],
            ("line 2",),
        ),
    ],
    ids=str,
)
def test_a_catalogue_without_usable_rows_is_refused_with_an_example(
    lines: list[str], why: tuple[str, ...]
) -> None:
    with raises_message(ConfigError, *why):
        read(*lines)


def test_files_are_read_plain_and_packed(tmp_path: Path) -> None:
    text = "\ufeff" + "\n".join([HEADER, ROW])
    plain, packed = tmp_path / "a.csv", tmp_path / "b.csv.gz"
    plain.write_text(text, encoding="utf-8")
    packed.write_bytes(gzip.compress(text.encode()))

    assert read_catalogue(plain).offers == read_catalogue(packed).offers == (V100,)
    assert read_catalogue(plain).source == str(plain)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (gzip.compress(b"type,price\na,1")[:-6], ()),
        (gzip.compress(b"x" * 99)[:12] + bytes(40), ()),
        (b"type,price\n\xff\xfe,1", ("UTF", "CSV")),
        (None, ()),
    ],
    ids=["cut", "garbled", "latin", "missing"],
)
def test_an_unreadable_file_is_refused(
    tmp_path: Path, raw: bytes | None, why: tuple[str, ...]
) -> None:
    path = tmp_path / "prices.csv"
    if raw is not None:
        path.write_bytes(raw)

    with raises_message(ConfigError, *why):
        read_catalogue(path)


def test_the_shipped_catalogue_is_small_dated_and_whole() -> None:
    found = shipped_catalogue()

    assert len(found.offers) == 60
    assert (found.refusals, found.notes) == ((), ())
    assert {offer.cloud for offer in found.offers} == {"aws", "gcp"}
    assert {offer.region[:3] for offer in found.offers} == {"us-"}
    assert {"T4", "V100", "A10G", "A100", "H100", "L4", ""} <= {o.accelerator for o in found.offers}
    assert all(offer.priced_on and offer.spot_on and offer.vcpus for offer in found.offers)


def test_the_shipped_catalogue_names_its_source_and_licence() -> None:
    folder = Path(__file__).parents[4] / "src" / "evenstride" / "planner" / "data"
    readme = (folder / "README.md").read_text()

    assert "Copyright (c) 2018 Robert Hafner" in readme
    assert "Apache-2.0" in readme
    for offer in shipped_catalogue().offers:
        assert offer.priced_on is not None
        assert offer.priced_on.isoformat() in readme


def test_a_row_of_more_accelerators_than_any_machine_has_is_refused() -> None:
    rows = "type,price,accelerator,accelerators\nx,1,A100,64\ny,1,A100,1000000\n"

    found = parse_catalogue(rows, "made")

    assert [offer.instance_type for offer in found.offers] == ["x"]
    check_message(str(found.refusals[0]), "'1000000'", "64")
