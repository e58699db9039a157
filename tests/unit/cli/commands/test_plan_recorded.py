"""``evenstride plan`` with recorded losses, parameter servers, and limits that leave nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from evenstride import __version__
from evenstride.cli.plan_request import installed_torch
from evenstride.planner.workload.workload_profile import (
    DeviceProfile,
    Model,
    Point,
    WorkloadProfile,
    write_profile,
)
from tests.messages import check_message
from tests.unit.cli.conftest import Answer, Shell

Plan = Callable[..., Answer]

PRICES = """type,region,usd_per_h,spot,interruption,accelerator,accelerators
small,east,1.0,0.3,<5%,T4,1
large,west,3.5,1.2,<5%,A100,1
"""
UP = [0, 2, 2, 1, 1, 2, 3, 2, 0, 1, 2, 1] * 10


@pytest.fixture
def plan(tmp_path: Path, shell: Shell) -> Plan:
    """Return what plans for a profile, for 20 epochs of one batch, at the prices above."""
    points = tuple(Point(samples=b, step_s=0.01 + 0.002 * b) for b in (32, 128, 512))
    whole = WorkloadProfile(
        evenstride=__version__,
        torch=installed_torch() or "2.13.0",
        made_on="2026-05-01",
        model=Model(parameters=1_000_000, gradient_bytes=4e8, digest="abc"),
        samples=50_000,
        global_batch=512,
        devices=(DeviceProfile(type="small", points=points, most_samples=600),),
    )
    write_profile(whole, tmp_path / "profile.json")
    (tmp_path / "prices.csv").write_text(PRICES)
    rows = (f"{600 * n},{up}" for n, up in enumerate(UP))
    (tmp_path / "seen.csv").write_text("\n".join(["at_s,up", *rows]))
    profile, prices = (str(tmp_path / name) for name in ("profile.json", "prices.csv"))
    return partial(shell, "plan", profile, "--epochs", "20", "--catalog", prices)


def chosen(answer: Answer) -> dict[str, float]:
    found = answer.json()
    row: dict[str, float] = found["candidates"][found["chosen"]]
    return row


def test_recorded_losses_make_spot_machines_slower(plan: Plan) -> None:
    asked = ("--objective", "cost", "--spot", "--types", "small", "--json")
    listed, recorded = chosen(plan(*asked)), chosen(plan(*asked, "--preemptions", "seen.csv:small"))
    others = chosen(plan(*asked[:3], "--json", "--preemptions", "seen.csv:large"))

    assert listed["stretch"] < 1.05 < recorded["stretch"]
    assert recorded["cost_usd"] > listed["cost_usd"]
    assert others["stretch"] == listed["stretch"]


def test_parameter_servers_take_another_time(plan: Plan) -> None:
    """Two workers, 400 MB at 10 Gbit/s: a ring takes 0.32 s, one server 3 parts of 0.32 s."""
    asked = ("--objective", "time", "--types", "small", "--max-nodes", "2", "--links", "0:10")
    ring, served = (
        plan(*asked, "--json", "--sync", sync).json()["candidates"][0]
        for sync in ("bsp", "bsp-ps(servers=1)")
    )

    assert ring["nodes"] == 2
    assert ring["communication_s"] == pytest.approx(0.32)
    assert served["nodes"] == 1 or served["communication_s"] == pytest.approx(0.96)
    assert served["time_s"] > ring["time_s"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--preemptions", "seen.csv"), ("--preemptions", "--spot")),
        (("--spot", "--preemptions", "seen.csv:tiny"), ()),
        (("--spot", "--preemptions", "none.csv"), ()),
        (("--sync", "asp"), ()),
        (("--sync", "psync"), ("'psync'",)),
        (("--types", "small", "--regions", "west"), ("--types", "--regions")),
        (
            ("--batches", "512", "--types", "small", "--max-nodes", "1", "--deadline", "1s"),
            (),
        ),
    ],
)
def test_invalid_input_is_refused(
    plan: Plan, options: tuple[str, ...], why: tuple[str, ...]
) -> None:
    answer = plan(*options)

    assert (answer.code, answer.out) == (2, "")
    check_message(answer.err, *why)


def test_people_are_reported_how_well_was_searched(plan: Plan) -> None:
    text = " ".join(plan("--objective", "cost").out.split())

    check_message(text, "0.00%")
    within = " ".join(plan("--deadline", "2h").out.split())
    check_message(within)
