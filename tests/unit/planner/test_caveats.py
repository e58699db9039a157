"""What is to be doubted of profiles and plans."""

from __future__ import annotations

import pytest

from evenstride.planner.catalogue.catalogue_reader import shipped_catalogue
from evenstride.planner.caveats import (
    nearest_types,
    no_machine,
    of_accelerator,
    of_device,
    of_spot,
)
from evenstride.planner.search.training_forecast import ClusterChoice
from evenstride.planner.spot_losses import SaveCosts
from evenstride.planner.workload.workload_profile import DeviceProfile, Point
from tests.messages import check_message
from tests.unit.planner.kinds import kind


def device(
    *times_s: float, name: str = "box", scatter: float = 0.01, on: str = ""
) -> DeviceProfile:
    sizes = (64, 256, 512)
    points = tuple(
        Point(samples=b, step_s=t, scatter=scatter, steps=50)
        for b, t in zip(sizes, times_s, strict=True)
    )
    return DeviceProfile.model_validate({"type": name, "points": points, "computed_on": on})


LINE = (0.0164, 0.0356, 0.0612)


def test_a_profile_on_its_line_is_not_doubted() -> None:
    assert list(of_device(device(*LINE))) == []


def test_a_profile_off_its_line_is_to_be_measured_again() -> None:
    (reported,) = of_device(device(0.054, 0.044, 0.119))

    assert "box is inaccurate" in reported
    assert "measure it again" in reported


def test_a_profile_that_wandered_is_to_be_measured_again() -> None:
    whole = device(*LINE)
    wandering = tuple(one.model_copy(update={"drift": 0.3}) for one in whole.points)

    (reported,) = of_device(whole.model_copy(update={"points": wandering}))

    assert "by 30%" in reported


def test_steps_that_do_not_grow_tell_nothing_of_a_sample() -> None:
    (reported,) = of_device(device(0.00471, 0.00471, 0.0047))

    check_message(reported, "512 samples")


@pytest.mark.parametrize(
    ("name", "on", "doubted"),
    [
        ("g4dn.xlarge", "cpu", True),
        ("g4dn.xlarge", "cuda", False),
        ("g4dn.xlarge", "", False),
        ("c5.4xlarge", "cpu", False),
        ("nobody-knows", "cpu", False),
    ],
)
def test_a_processor_says_nothing_of_a_types_accelerator(name: str, on: str, doubted: bool) -> None:
    reported = of_accelerator(device(*LINE, name=name, on=on), shipped_catalogue())

    assert ("has the accelerator T4" in reported) == doubted


def test_spot_machines_need_a_script_that_saves() -> None:
    choice = ClusterChoice((kind("a"), kind("b", losses_per_h=0.2)), (1, 2), 64)

    first, second = of_spot(choice, SaveCosts(2.0, (60.0, 180.0)))

    assert "evenstride.Checkpointer" in first
    check_message(first.lower(), "2 s")
    check_message(second, "0.2")
    assert of_spot(ClusterChoice((kind("a"),), (1,), 64), SaveCosts(2.0, (60.0,))) == []


def test_an_unknown_type_is_named_with_the_nearest() -> None:
    shipped = shipped_catalogue()

    reported = no_machine([device(*LINE, name="g4dn.xlage")], shipped)

    assert "has no g4dn.xlage" in reported
    assert "nearest are g4dn.xlarge" in reported
    assert "it has " in nearest_types("%%%", shipped)
    left = no_machine([device(*LINE, name="g4dn.xlarge")], shipped)
    assert "--types" in left
