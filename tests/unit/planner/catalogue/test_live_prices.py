"""Live prices: gpuhunt's answers, as recorded, become offers; the network is never asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest

from evenstride.errors import ConfigError
from evenstride.planner.catalogue.live_prices import catalogue_of, live_catalogue
from evenstride.planner.catalogue.offers import Catalogue, Offer
from tests.messages import check_message, raises_message

TODAY = date(2026, 8, 1)


@dataclass(slots=True)
class Item:
    """What gpuhunt's ``CatalogItem`` has, as far as it is looked at."""

    provider: str
    instance_name: str
    location: str
    price: float
    cpu: int | None
    memory: float | None
    gpu_count: int | None
    gpu_name: str | None
    gpu_memory: float | None
    spot: bool


AZURE = [
    Item("azure", "Standard_NC24ads_A100_v4", "eastus", 3.673, 24, 220.0, 1, "A100", 80.0, False),
    Item("azure", "Standard_NC24ads_A100_v4", "eastus", 0.6787, 24, 220.0, 1, "A100", 80.0, True),
    Item("azure", "Standard_ND96asr_v4", "eastus", 27.197, 96, 900.0, 8, "A100", 40.0, False),
    Item("azure", "Standard_NC6s_v3", "eastus", 3.06, 6, 112.0, 1, "V100", 16.0, False),
    Item("azure", "Standard_ND40rs_v2", "eastus", 22.032, 40, 672.0, 8, "V100", 32.0, False),
    Item("azure", "Standard_NV6ads_A10_v5", "eastus", 0.454, 6, 55.0, 1, "A10", 4.0, False),
    Item("azure", "Standard_D2s_v3", "eastus", 0.096, 2, 8.0, 0, None, None, False),
    Item("azure", "Standard_D2s_v3", "eastus", 0.0179, 2, 8.0, 0, None, None, True),
]
OTHERS = [
    Item("aws", "g4dn.xlarge", "us-east-1", 0.526, 4, 16.0, 1, "T4", 16.0, False),
    Item("gcp", "n1-standard-8", "us-central1-a", 0.73, 8, 30.0, 1, "T4", 16.0, False),
    Item("gcp", "n1-standard-8", "us-central1-a", 2.86, 8, 30.0, 1, "V100", 16.0, False),
    Item("gcp", "n1-standard-8", "us-central1-a", 0.38, 8, 30.0, 0, None, None, False),
    Item("gcp", "n1-standard-8", "us-central1-a", 0.19, 8, 30.0, 1, "T4", 16.0, True),
]


def found(items: Sequence[Item]) -> Catalogue:
    return catalogue_of(items, TODAY, "gpuhunt")


def named(catalogue: Catalogue) -> dict[str, Offer]:
    return {offer.instance_type: offer for offer in catalogue.offers}


def test_a_machine_on_demand_and_as_spot_is_one_offer() -> None:
    (offer,) = found(AZURE[:2]).offers

    assert offer == Offer(
        cloud="azure",
        region="eastus",
        instance_type="Standard_NC24ads_A100_v4",
        accelerator="A100-80GB",
        accelerators=1.0,
        vcpus=24.0,
        memory_gib=220.0,
        usd_per_h=3.673,
        spot_usd_per_h=0.6787,
        spot_kind="listed",
        priced_on=TODAY,
        spot_on=TODAY,
    )


def test_all_of_azures_answer_is_used() -> None:
    catalogue = found(AZURE)
    offers = named(catalogue)

    assert catalogue.refusals == ()
    assert len(offers) == 6
    assert offers["Standard_ND96asr_v4"].accelerator == "A100"
    assert offers["Standard_NC6s_v3"].accelerator == "V100"
    assert offers["Standard_ND40rs_v2"].accelerator == "V100-32GB"
    assert offers["Standard_ND40rs_v2"].spot_usd_per_h is None
    assert offers["Standard_D2s_v3"].accelerators == 0.0
    assert offers["Standard_D2s_v3"].spot_usd_per_h == 0.0179


def test_a_fraction_of_an_accelerator_is_reported_as_such() -> None:
    assert named(found(AZURE))["Standard_NV6ads_A10_v5"].accelerators == pytest.approx(1 / 6)


def test_google_names_a_zone_and_sells_one_type_with_several_accelerators() -> None:
    catalogue = found(OTHERS)

    assert catalogue.refusals == ()
    t4, v100, plain = catalogue.offers[1:]
    assert (t4.region, t4.zone) == ("us-central1", "us-central1-a")
    assert (t4.accelerator, v100.accelerator, plain.accelerator) == ("T4", "V100", "")
    assert (t4.spot_usd_per_h, v100.spot_usd_per_h, plain.spot_usd_per_h) == (0.19, None, None)
    assert (catalogue.offers[0].region, catalogue.offers[0].zone) == ("us-east-1", "")


GOOD = AZURE[0]
BAD = {
    "its price is 0": replace(GOOD, location="westus", price=0.0),
    "its price is -1": replace(GOOD, location="westus", price=-1.0),
    "its processors and memory are not known": replace(
        GOOD, location="westus", cpu=None, memory=None
    ),
    "the type of its accelerators is not known": replace(GOOD, location="westus", gpu_name=None),
    "it has no name or no location": replace(GOOD, location=""),
    "it is a duplicate; the first one is used": replace(GOOD, price=1.0),
    "it has a spot price, but no on-demand price": replace(GOOD, location="westus", spot=True),
}


@pytest.mark.parametrize("why", BAD)
def test_unusable_offers_are_reported_by_number_and_the_rest_is_used(why: str) -> None:
    catalogue = found([GOOD, BAD[why], AZURE[6]])

    assert [offer.instance_type for offer in catalogue.offers] == [
        "Standard_NC24ads_A100_v4",
        "Standard_D2s_v3",
    ]
    assert catalogue.offers[0].usd_per_h == GOOD.price
    (refusal,) = catalogue.refusals
    assert (refusal.line, refusal.instance_type) == (2, "Standard_NC24ads_A100_v4")
    assert why in refusal.why


def test_an_empty_answer_is_refused_with_the_remedy() -> None:
    with raises_message(ConfigError):
        found([])
    with raises_message(ConfigError, "line 1", "0.0"):
        found([replace(GOOD, price=0.0)])


def _installed(monkeypatch: pytest.MonkeyPatch, query: Any) -> None:
    module = SimpleNamespace(query=query, GPUHuntError=RuntimeError)
    monkeypatch.setitem(sys.modules, "gpuhunt", module)


def test_gpuhunt_is_asked_for_some_clouds_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def query(provider: list[str]) -> list[Item]:
        asked.append(provider)
        return AZURE

    _installed(monkeypatch, query)
    catalogue = live_catalogue(TODAY)

    assert asked == [["aws", "azure", "gcp"]]
    assert len(catalogue.offers) == 6
    check_message(catalogue.source, "2026-08-01")
    check_message(catalogue.notes)
    assert live_catalogue(TODAY, ["azure"]).notes == ()


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (
            ValueError("Unknown provider: awz"),
            ("'Unknown provider: awz'",),
        ),
        (OSError("no route to host"), ()),
        (RuntimeError("no list"), ()),
    ],
    ids=["unknown", "unreachable", "its own"],
)
def test_a_failed_query_is_reported(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reported: tuple[str, ...]
) -> None:
    def query(provider: list[str]) -> list[Item]:
        raise error

    _installed(monkeypatch, query)

    with raises_message(ConfigError, *reported):
        live_catalogue(TODAY, ["awz"])


def test_without_gpuhunt_the_message_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gpuhunt", None)

    with raises_message(ConfigError, "'evenstride[plan]'"):
        live_catalogue(TODAY)
