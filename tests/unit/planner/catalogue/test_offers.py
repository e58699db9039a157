"""Offers: what may be selected, what prices are worth on another day, and how they are shown."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from math import log

import pytest

from evenstride.errors import ConfigError
from evenstride.planner.catalogue.offers import (
    Catalogue,
    Offer,
    price_interval,
    price_label,
    priced_by_memory,
)
from tests.messages import raises_message

PRICED, SAVED = date(2022, 11, 22), date(2025, 6, 28)
V100 = Offer(
    cloud="aws",
    region="us-east-1",
    instance_type="p3.2xlarge",
    accelerator="V100",
    accelerators=1.0,
    usd_per_h=3.06,
    spot_usd_per_h=0.612,
    spot_kind="estimated",
    priced_on=PRICED,
    spot_on=SAVED,
)
L4 = Offer(
    cloud="gcp",
    region="us-central1",
    instance_type="g2-standard-4",
    accelerator="L4",
    accelerators=1.0,
    usd_per_h=0.7068,
    spot_usd_per_h=0.3973,
    spot_kind="listed",
    priced_on=date(2026, 7, 30),
    spot_on=date(2026, 7, 30),
)
PLAIN = Offer(cloud="aws", region="us-west-2", instance_type="m5.large", usd_per_h=0.096)
CATALOGUE = Catalogue((V100, L4, PLAIN), (), "prices.csv")


def _width(offer: Offer, on: date, *, spot: bool = False) -> float:
    found = price_interval(offer, on, spot=spot)
    assert found.low <= found.value <= found.high
    return log(found.high / found.low)


def test_a_price_on_demand_is_exact_on_its_day_and_less_so_before_and_after() -> None:
    found = price_interval(V100, PRICED)
    years = [_width(V100, PRICED + timedelta(days=365 * n)) for n in range(4)]

    assert (found.low, found.value, found.high) == (3.06, 3.06, 3.06)
    assert years == sorted(set(years))
    assert _width(V100, PRICED - timedelta(days=365)) == years[1]


def test_a_price_on_demand_falls_further_than_it_rises() -> None:
    found = price_interval(V100, date(2023, 11, 22))

    assert found.low == pytest.approx(3.06 * 0.85, rel=1e-3)
    assert found.high == pytest.approx(3.06 * 1.05, rel=1e-3)


def test_a_spot_price_is_never_exact_and_ages_faster_than_that_on_demand() -> None:
    today = L4.priced_on
    assert today is not None

    assert _width(L4, today, spot=True) == pytest.approx(0.24)
    later = today + timedelta(days=365)
    assert _width(L4, later, spot=True) > 2.0 * _width(L4, later)


def test_an_estimate_from_two_days_is_less_sure_than_a_price_of_the_later_one() -> None:
    listed = Offer(
        instance_type="x",
        usd_per_h=3.06,
        spot_usd_per_h=0.612,
        spot_kind="listed",
        priced_on=PRICED,
        spot_on=SAVED,
    )
    once = Offer(
        instance_type="x",
        usd_per_h=3.06,
        spot_usd_per_h=0.612,
        spot_kind="estimated",
        priced_on=SAVED,
        spot_on=SAVED,
    )

    mixed = _width(V100, SAVED, spot=True)

    assert mixed > 2.0 * _width(listed, SAVED, spot=True)
    assert _width(once, SAVED, spot=True) == _width(listed, SAVED, spot=True)


def test_a_spot_price_ends_at_what_the_machine_costs_on_demand() -> None:
    dear = Offer(instance_type="x", usd_per_h=1.0, spot_usd_per_h=0.95, priced_on=PRICED)

    found = price_interval(dear, PRICED, spot=True)

    assert found.high == 1.0
    assert found.low < 0.9


def test_a_spot_price_above_the_one_on_demand_is_the_most() -> None:
    odd = Offer(
        instance_type="x", usd_per_h=1.0, spot_usd_per_h=1.2, priced_on=PRICED, spot_on=PRICED
    )

    assert price_interval(odd, PRICED, spot=True).high == 1.2


def test_a_price_without_a_date_is_a_year_old() -> None:
    dated = Offer(instance_type="x", usd_per_h=0.096, priced_on=date(2022, 1, 1))

    undated = price_interval(PLAIN, date(2030, 1, 1))
    year = price_interval(dated, date(2023, 1, 1))

    assert undated.low == pytest.approx(year.low, rel=1e-3)
    assert undated.high == pytest.approx(year.high, rel=1e-3)


def test_a_missing_spot_price_is_reported() -> None:
    for ask in (
        lambda: price_interval(PLAIN, PRICED, spot=True).value,
        lambda: price_label(PLAIN, spot=True),
    ):
        with raises_message(ConfigError, "m5.large"):
            ask()


def test_prices_are_shown_with_their_days() -> None:
    assert price_label(V100) == "3.06 USD/h (2022-11-22)"
    assert price_label(L4, spot=True) == "0.3973 USD/h (2026-07-30)"
    assert price_label(PLAIN) == "0.096 USD/h (undated)"
    mixed = "0.612 USD/h (estimated: price of 2022-11-22, saving of 2025-06-28)"
    assert price_label(V100, spot=True) == mixed


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, (V100, L4, PLAIN)),
        ({"clouds": ["AWS"]}, (V100, PLAIN)),
        ({"regions": ["us-central1", "us-west-2"]}, (L4, PLAIN)),
        ({"types": ["M5.Large"]}, (PLAIN,)),
        ({"accelerators": ["v100", "l4"]}, (V100, L4)),
        ({"accelerators": ["none"]}, (PLAIN,)),
        ({"clouds": ["gcp"], "accelerators": ["V100"]}, ()),
    ],
    ids=str,
)
def test_offers_are_selected_by_name(asked: dict[str, list[str]], found: tuple[Offer, ...]) -> None:
    chosen = CATALOGUE.select(**asked)

    assert chosen.offers == found
    assert chosen.source == CATALOGUE.source


@pytest.mark.parametrize(
    ("asked", "reported"),
    [
        (
            {"regions": ["us-esat-1"]},
            ("'us-esat-1'",),
        ),
        ({"types": ["p3.2xlrge"]}, ()),
        ({"accelerators": ["H100"]}, ("V100",)),
        ({"clouds": ["azure"]}, ("'azure'",)),
    ],
    ids=str,
)
def test_an_unknown_name_is_refused_with_the_nearest(
    asked: dict[str, list[str]], reported: tuple[str, ...]
) -> None:
    with raises_message(ConfigError, *reported):
        CATALOGUE.select(**asked)


@pytest.mark.parametrize(
    "wrong",
    [
        {"usd_per_h": 0.0},
        {"usd_per_h": float("nan")},
        {"spot_usd_per_h": -1.0},
        {"interruption": (0.2, 0.1)},
        {"interruption": (0.0, 20.0)},
    ],
    ids=str,
)
def test_an_invalid_offer_is_refused(wrong: dict[str, object]) -> None:
    with raises_message(ConfigError):
        Offer(**{"instance_type": "x", "usd_per_h": 1.0, **wrong})  # type: ignore[arg-type]


def test_a_price_by_memory_is_the_same_for_equal_memory_and_keeps_the_saving_of_spot() -> None:
    small = replace(PLAIN, memory_gib=8.0, spot_usd_per_h=0.048, spot_on=SAVED)
    large = replace(L4, memory_gib=16.0)
    whole = Catalogue((small, large, V100), (), "prices.csv")

    found = priced_by_memory(whole, 0.005, SAVED)

    assert [one.usd_per_h for one in found.offers] == pytest.approx([0.04, 0.08])
    assert found.offers[0].spot_usd_per_h == pytest.approx(0.02)
    assert price_interval(found.offers[0], SAVED).high == pytest.approx(0.04)
    assert found.notes == ("1 offers of unknown memory have no price by memory",)
    assert "0.005 USD" in found.source


def test_a_price_by_memory_needs_a_price_and_memory() -> None:
    with raises_message(ConfigError, "0.004"):
        priced_by_memory(CATALOGUE, 0.0, SAVED)
    with raises_message(ConfigError, "MemoryGiB"):
        priced_by_memory(CATALOGUE, 0.005, SAVED)
