"""Offers and measured devices together."""

from datetime import date

import pytest

from evenstride.errors import ConfigError
from evenstride.planner.catalogue.offers import Offer
from evenstride.planner.search.candidates import rentable
from evenstride.planner.workload.workload_profile import DeviceProfile, Point
from tests.messages import raises_message

TODAY = date(2026, 6, 1)


def offer(name: str, usd_per_h: float = 1.0, **rest: object) -> Offer:
    return Offer(instance_type=name, usd_per_h=usd_per_h, priced_on=TODAY, **rest)  # type: ignore[arg-type]


def device(
    name: str, most: int | None = None, maker: str = "", factor: float = 1.0
) -> DeviceProfile:
    points = (Point(samples=8, step_s=0.02 * factor), Point(samples=64, step_s=0.076 * factor))
    return DeviceProfile(type=name, device=maker, points=points, most_samples=most)


def test_a_measured_type_is_taken_as_measured() -> None:
    found = rentable([offer("t4-box", accelerator="T4", accelerators=4)], [device("t4-box")], TODAY)

    (kind,) = found.kinds
    assert kind.curve.measured
    assert kind.curve.per_sample_s == pytest.approx(0.001)
    assert kind.workers == 4
    assert found.measured == ("t4-box",)


def test_others_are_carried_over_from_the_nearest_of_their_kind() -> None:
    offers = [
        offer("t4-box", accelerator="T4", accelerators=1),
        offer("a100-box", accelerator="A100", accelerators=1),
        offer("v100-box", accelerator="V100", accelerators=1),
        offer("cpu-box", vcpus=8.0),
        offer("odd-box", accelerator="Odd", accelerators=1),
    ]

    found = rentable(offers, [device("t4-box", most=160), device("a100-box")], TODAY)

    kinds = {kind.type: kind for kind in found.kinds}
    assert set(kinds) == {"t4-box", "a100-box", "v100-box"}
    assert found.unknown == ("cpu-box", "odd-box")
    assert not kinds["v100-box"].curve.measured
    assert kinds["v100-box"].curve.per_sample_s < 0.001  # from the T4: of the A100's memory
    assert kinds["v100-box"].most_samples == 160  # it has less than half
    only = rentable(offers, [device("t4-box")], TODAY, transfer=False)
    assert [kind.type for kind in only.kinds] == ["t4-box"]


def test_memory_is_carried_over_in_proportion() -> None:
    offers = [
        offer("t4-box", accelerator="T4", accelerators=1),
        offer("a100-box", accelerator="A100", accelerators=1),
    ]

    limited = rentable(offers, [device("t4-box", most=160)], TODAY).kinds
    unlimited = rentable(offers, [device("t4-box")], TODAY).kinds
    smaller = rentable(offers, [device("a100-box")], TODAY)

    assert [kind.most_samples for kind in limited] == [160, 400]
    assert [kind.most_samples for kind in unlimited] == [None, None]
    assert smaller.unknown == ("t4-box",)  # 16 GiB, where 40 were measured


def test_less_memory_holds_less_than_was_measured() -> None:
    offers = [offer("big", vcpus=8.0, memory_gib=32.0), offer("half", vcpus=8.0, memory_gib=16.0)]

    big, half = rentable(offers, [device("big")], TODAY).kinds

    assert (big.most_samples, half.most_samples) == (None, 32)


def test_a_part_of_an_accelerator_is_planned_with_only_where_it_was_measured() -> None:
    part = offer("sixth", accelerator="A10", accelerators=1 / 6)
    whole = offer("whole", accelerator="A10", accelerators=1)

    assert rentable([part, whole], [device("whole")], TODAY).unknown == ("sixth",)
    assert [kind.type for kind in rentable([part], [device("sixth")], TODAY).kinds] == ["sixth"]


def test_types_left_out_of_the_choice_still_give_their_hardware() -> None:
    t4, v100 = (offer(f"{name}-box", accelerator=name, accelerators=1) for name in ("T4", "V100"))

    assert rentable([v100], [device("T4-box")], TODAY).kinds == ()
    found = rentable([v100], [device("T4-box")], TODAY, known_offers=[t4, v100])
    assert [kind.type for kind in found.kinds] == ["V100-box"]


def test_spot_machines_are_kinds_of_their_own_where_asked_for() -> None:
    some = [offer("t4-box", spot_usd_per_h=0.3, interruption=(0.05, 0.1), spot_on=TODAY)]

    assert len(rentable(some, [device("t4-box")], TODAY).kinds) == 1
    demand, spot = rentable(some, [device("t4-box")], TODAY, spot=True).kinds
    assert not demand.spot
    assert spot.spot
    assert spot.usd_per_h.value == 0.3
    assert spot.transience is not None
    assert 0.05 / 800 < spot.transience.losses_per_h.value < 0.1 / 600


N1 = [
    offer("n1-standard-8", 0.4, vcpus=8.0, memory_gib=30.0),
    offer("n1-standard-8", 0.7, vcpus=8.0, accelerator="T4", accelerators=1),
    offer("n1-standard-8", 1.1, vcpus=8.0, accelerator="T4", accelerators=2),
    offer("n1-standard-8", 2.9, vcpus=8.0, accelerator="V100", accelerators=1),
]


@pytest.mark.parametrize(
    "measured", [device("n1-standard-8", maker="Tesla T4"), device("n1-standard-8+T4")]
)
def test_one_type_with_several_accelerators_is_several(measured: DeviceProfile) -> None:
    found = rentable(N1, [measured], TODAY)

    kinds = {kind.name: kind for kind in found.kinds}
    assert set(kinds) == {"n1-standard-8+T4:1", "n1-standard-8+T4:2", "n1-standard-8+V100:1"}
    assert {name for name, kind in kinds.items() if kind.curve.measured} == {
        *("n1-standard-8+T4:1", "n1-standard-8+T4:2"),
    }
    assert kinds["n1-standard-8+T4:2"].workers == 2
    assert kinds["n1-standard-8+T4:2"].accelerators == "T4:2"
    assert found.unknown == ("n1-standard-8",)  # that without any
    assert found.measured == (measured.type,)


def test_each_of_them_can_be_measured() -> None:
    own = [device("n1-standard-8+none", factor=30.0), device("n1-standard-8+T4")]

    kinds = {kind.name: kind for kind in rentable(N1, own, TODAY).kinds}

    assert kinds["n1-standard-8+none"].curve.per_sample_s == pytest.approx(0.03)
    assert kinds["n1-standard-8+T4:1"].curve.per_sample_s == pytest.approx(0.001)


def test_the_name_of_a_device_tells_the_nearest_accelerator() -> None:
    several = [offer("box", accelerator=name, accelerators=1) for name in ("A100", "A100-80GB")]
    small = device("box", maker="NVIDIA A100-SXM4-40GB")
    large = device("box", maker="NVIDIA A100-SXM4-80GB")

    for one, name in ((small, "box+A100:1"), (large, "box+A100-80GB:1")):
        kinds = rentable(several, [one], TODAY).kinds
        assert [kind.name for kind in kinds if kind.curve.measured] == [name]


@pytest.mark.parametrize("maker", ["", "NVIDIA L4"])
def test_what_could_be_several_is_refused_with_the_way_out(maker: str) -> None:
    ways = [f"n1-standard-8+{accelerator}" for accelerator in ("none", "T4", "V100")]
    with raises_message(ConfigError, *ways):
        rentable(N1[:1], [device("n1-standard-8", maker=maker)], TODAY, known_offers=N1)


GPU = offer("t4-box", accelerator="T4", accelerators=1)


def by(name: str, computed_on: str) -> DeviceProfile:
    return device(name).model_copy(update={"computed_on": computed_on})


def test_what_a_processor_computed_is_not_sold_as_an_accelerators() -> None:
    """Neither under that type nor carried over to others; `force` plans with it all the same."""
    own, others = by("t4-box", "cpu"), [GPU, offer("a100-box", accelerator="A100", accelerators=1)]

    with raises_message(ConfigError):
        rentable(others, [own], TODAY)
    with raises_message(ConfigError):
        rentable(others[1:], [own], TODAY, known_offers=others)
    with raises_message(ConfigError):
        rentable(N1, [by("n1-standard-8+T4", "cpu")], TODAY)
    forced = rentable(others, [own], TODAY, force=True)
    assert [kind.type for kind in forced.kinds] == ["t4-box", "a100-box"]
    assert forced.pretended == ("t4-box",)
    for known in (by("t4-box", "cuda"), by("t4-box", "")):
        found = rentable(others, [known], TODAY)
        assert (len(found.kinds), found.pretended) == (2, ())


def test_what_a_processor_computed_is_a_processors() -> None:
    some = [offer("four", vcpus=4.0), offer("eight", vcpus=8.0), GPU]

    found = rentable(some, [by("four", "cpu")], TODAY)

    assert [kind.type for kind in found.kinds] == ["four", "eight"]
    assert found.kinds[1].curve.source == "four"
    assert found.unknown == ("t4-box",)


def test_an_accelerator_that_the_catalogue_does_not_know_of_is_not_carried_to_processors() -> None:
    some = [offer("four", vcpus=4.0), offer("eight", vcpus=8.0)]

    assert [kind.type for kind in rentable(some, [by("four", "cuda")], TODAY).kinds] == ["four"]
