"""Property: of any mixture of rows all good ones are used, and bad ones reported by line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.errors import ConfigError
from evenstride.planner.catalogue.catalogue_reader import (
    parse_catalogue,
    read_catalogue,
    shipped_catalogue,
)

HEADER = "Cloud,Region,InstanceType,Price,SpotPrice,InterruptionBand"
names = st.text("abcxyz0189.-", min_size=1, max_size=8)
prices = st.floats(1e-4, 1e4).map(lambda price: f"{price:.6g}")
good_rows = st.builds(
    "{},{},{},{},{},{}".format,
    st.sampled_from(["aws", "gcp", ""]),
    st.sampled_from(["us-east-1", "eu", ""]),
    names,
    prices,
    prices | st.just(""),
    st.sampled_from(["<5%", "5-10%", ">20%", ""]),
)
bad_rows = st.sampled_from(
    [
        "aws,eu,x,,,",
        "aws,eu,x,-1,,",
        "aws,eu,x,0.5 EUR,,",
        "aws,eu,x,3,06,,",
        'aws,eu,x,"3,06",,',
        'aws,eu,"x,1,,',
        "aws,eu,x,1,-2,",
        "aws,eu,x,1,,20-10%",
        "aws,eu,,1,,",
        "aws,eu,x",
        "x,\x00,\x1c,\x85,\u2028,",
        ",,,,,",
    ]
)
comments = st.sampled_from(["", "   ", '# "a comment'])
rows = st.lists(
    st.tuples(st.just("good"), good_rows)
    | st.tuples(st.just("bad"), bad_rows)
    | st.tuples(st.just("none"), comments),
    max_size=30,
)


@given(rows=rows, end=st.sampled_from(["\n", "\r\n"]))
def test_good_rows_are_used_and_bad_ones_reported(rows: list[tuple[str, str]], end: str) -> None:
    used, refused, seen = [], [], set()
    for line, (sort, row) in enumerate(rows, start=2):
        cells = row.split(",")
        if sort == "good" and tuple(cells[:3]) not in seen:
            seen.add(tuple(cells[:3]))
            used.append((cells[2], float(cells[3])))
        elif sort != "none":
            refused.append(line)

    text = end.join([HEADER, *(row for _, row in rows)])
    if not used:
        with pytest.raises(ConfigError, match="A catalogue looks like"):
            parse_catalogue(text, "prices.csv")
        return
    found = parse_catalogue(text, "prices.csv")

    assert [(offer.instance_type, offer.usd_per_h) for offer in found.offers] == used
    assert [refusal.line for refusal in found.refusals] == refused
    assert all(refusal.why for refusal in found.refusals)


@given(text=st.text() | st.text().map(lambda text: "type,price\n" + text))
def test_no_text_does_anything_but_be_read_or_refused(text: str) -> None:
    try:
        found = parse_catalogue(text, "prices.csv")
    except ConfigError:
        return

    assert found.offers


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "rows", "aws", "spot"),
    [
        ("catalog-us.csv", 2_169, 1_125, 2_126),
        ("catalog-all-regions.csv.gz", 26_641, 8_972, 24_817),
    ],
)
def test_the_catalogue_at_hand_is_read_without_a_refusal(
    data_root: Path, name: str, rows: int, aws: int, spot: int
) -> None:
    path = data_root / "cloud-catalog" / name
    if not path.is_file():
        pytest.skip("no catalogue")

    found = read_catalogue(path)

    assert len(found.offers) == rows
    assert (found.refusals, found.notes) == ((), ())
    assert sum(offer.cloud == "aws" for offer in found.offers) == aws
    assert sum(offer.spot_usd_per_h is not None for offer in found.offers) == spot


@pytest.mark.data
def test_the_shipped_catalogue_is_part_of_the_full_one(data_root: Path) -> None:
    path = data_root / "cloud-catalog" / "catalog-us.csv"
    if not path.is_file():
        pytest.skip("no catalogue")

    assert set(shipped_catalogue().offers) < set(read_catalogue(path).offers)
