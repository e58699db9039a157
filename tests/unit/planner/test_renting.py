"""Offers and measured devices together."""

from datetime import date

import pytest

from evenstride.planner.offers import Offer
from evenstride.planner.renting import rentable
from evenstride.planner.workload import Device, Point

TODAY = date(2026, 6, 1)


def offer(name: str, usd_per_h: float = 1.0, **rest: object) -> Offer:
    return Offer(instance_type=name, usd_per_h=usd_per_h, priced_on=TODAY, **rest)  # type: ignore[arg-type]


def device(name: str, most: int | None = None) -> Device:
    points = (Point(samples=8, step_s=0.02), Point(samples=64, step_s=0.076))
    return Device(type=name, points=points, most_samples=most)


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


def test_what_is_left_out_of_the_choice_still_tells_the_hardware() -> None:
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
