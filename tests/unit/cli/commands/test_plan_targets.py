"""``evenstride plan RUN... --target-loss``: runs that came to a target tell how epochs follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from evenstride import __version__
from evenstride.cli.plan_request import installed_torch
from evenstride.planner.workload.workload_profile import (
    DeviceProfile,
    Model,
    Point,
    ReachedTraining,
    WorkloadProfile,
    write_profile,
)
from tests.messages import check_message, lines_with
from tests.unit.cli.conftest import Answer, Shell
from tests.unit.planner.runs import SAMPLES, life, metric, noisy, went

Plan = Callable[..., Answer]
Epochs = Callable[[float, float], float]

BATCHES = (256, 512, 1024)
TORCH = installed_torch() or "2.13.0"


def gain_law(batch: float, gamma: float) -> float:
    del batch
    return 2.0 + 20.0 * gamma


def noise_law(batch: float, gamma: float) -> float:
    del gamma
    return 8.0 * (1.0 + batch / 1000.0)


def gamma_at(batch: float) -> float:
    """Return how noisy the gradient is at a batch, as Scavenger has it."""
    return 0.3 + 4.0 / sqrt(batch)


def trained(folder: Path, batch: int, epochs: float, *, workers: Sequence[str] = ("a/0",)) -> Path:
    """Write a run that comes to a loss of 0.35 after some epochs, in a straight line."""
    gain = 8 * gamma_at(batch)
    scale, each = batch * (gain - 1) / (8 - gain), SAMPLES // batch
    last = int(epochs) + 2
    records = [went(each * e, float(e)) for e in range(last)]
    records += [metric(float(e), 1.0 - 0.65 * e / epochs) for e in range(last + 1)]
    records += [noisy(n, scale, batch) for n in range(0, each * last, 20)]
    times_s = dict.fromkeys(range(len(workers)), 0.002 * batch)
    facts = {"evenstride": __version__, "torch": TORCH, "device": "Tesla T4"}
    life(folder, records, batch=batch, workers=workers, busy_s=times_s, **facts)
    return folder


def three(folder: Path, law: Epochs) -> list[str]:
    runs = [trained(folder / str(b), b, law(b, gamma_at(b))) for b in BATCHES]
    return [str(run) for run in runs]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    points = tuple(Point(samples=b, step_s=0.01 + 0.002 * b, scatter=0.02) for b in (32, 128, 512))
    whole = WorkloadProfile(
        evenstride=__version__,
        torch=TORCH,
        made_on="2026-05-01",
        model=Model(parameters=1_000_000, gradient_bytes=4e6, digest="abc"),
        samples=SAMPLES,
        global_batch=512,
        devices=(DeviceProfile(type="small", points=points),),
    )
    write_profile(whole, tmp_path / "profile.json")
    return tmp_path / "profile.json"


@pytest.fixture
def plan(tmp_path: Path, shell: Shell) -> Plan:
    """Return what plans at some prices for the least cost."""
    prices = tmp_path / "prices.csv"
    prices.write_text("type,usd_per_h,accelerator,accelerators\nsmall,1.0,T4,1\nbig,3.5,A100,1\n")
    return partial(shell, "plan", "--catalog", str(prices), "--objective", "cost")


@pytest.mark.parametrize(("law", "name"), [(gain_law, "gain"), (noise_law, "noise")])
def test_the_law_that_the_runs_follow_is_found(
    plan: Plan, profile: Path, law: Epochs, name: str
) -> None:
    runs = three(profile.parent, law)

    found = plan(str(profile), *runs, "--target-loss", "0.35", "--json").json()

    check_message(found["caveats"], name)
    assert found["target"] == "loss 0.35"
    for one, batch in zip(found["trainings"], BATCHES, strict=True):
        expected = {"batch": batch, "epochs": law(batch, gamma_at(batch)), "gamma": gamma_at(batch)}
        assert one == pytest.approx(expected)
    chosen = found["candidates"][found["chosen"]]
    batch = chosen["global_batch"]
    epochs = chosen["time_s"] / chosen["stretch"] / chosen["step_s"] * batch / SAMPLES
    assert epochs == pytest.approx(law(batch, gamma_at(batch)), rel=0.01)


def test_runs_alone_need_names_for_their_machines(plan: Plan, tmp_path: Path) -> None:
    runs = three(tmp_path, noise_law)

    check_message(plan(*runs, "--target-loss", "0.35").refusal())
    found = plan(*runs, "--target-loss", "0.35", "--as", "small", "--json").json()
    assert found["types_measured"] == ["small"]


def test_trainings_and_runs_that_missed_the_target_are_listed(plan: Plan, profile: Path) -> None:
    runs = three(profile.parent, noise_law)
    short = profile.parent / "short"
    life(
        short,
        [went(0, 0.0), metric(1.0, 0.5)],
        busy_s={0: 1.0},
        evenstride=__version__,
        torch=TORCH,
    )

    text = plan(str(profile), *runs, str(short), "--target-loss", "0.35").out

    check_message(lines_with(text, "epochs to", "did not reach", "nearest"), "12.1", "0.5")


def test_links_of_a_run_count_together_with_a_profile(plan: Plan, profile: Path) -> None:
    run = trained(profile.parent / "two", 512, 10.0, workers=("a/0", "b/1"))

    found = plan(str(profile), str(run), "--target-loss", "0.35", "--json").json()

    assert not any("links were not measured" in one for one in found["caveats"])
    check_message(found["caveats"], "10", "512")
    assert found["types_measured"] == ["small"]


def _trained_before(profile: Path, target: str) -> None:
    whole = WorkloadProfile.model_validate_json(profile.read_text())
    more = {"target": target, "trainings": (ReachedTraining(batch=128, epochs=9.0),)}
    write_profile(whole.model_copy(update=more), profile)


def test_trainings_that_a_profile_keeps_count_if_they_came_to_the_same(
    plan: Plan, profile: Path
) -> None:
    runs = three(profile.parent, noise_law)
    _trained_before(profile, "loss 0.35")

    found = plan(str(profile), *runs, "--target-loss", "0.35", "--json").json()
    other = plan(str(profile), *runs, "--target-loss", "0.4").refusal()

    assert [one["batch"] for one in found["trainings"]] == [128, *BATCHES]
    check_message(other, "0.35", "0.4")


def _training_loss_only(folder: Path) -> None:
    steps: list[dict[str, Any]] = [went(0, 0.0)]
    steps += [noisy(n, 90.0, 256, loss=1.0 - 0.01 * n) for n in range(199)]
    life(folder, steps, batch=256, busy_s={0: 1.0}, evenstride=__version__, torch=TORCH)


def test_a_training_loss_is_not_an_evaluated_one(plan: Plan, profile: Path) -> None:
    runs = three(profile.parent, noise_law)
    _training_loss_only(profile.parent / "plain")

    answer = plan(str(profile), *runs, str(profile.parent / "plain"), "--target-loss", "0.35")

    check_message(answer.refusal(), "0.35")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--target-loss", "0.01"), ("0.01",)),
        (("--target-loss", "nan"), ("--target-loss",)),
        (("--target-loss", "0.35", "--metric", "error"), ()),
        (("--target-loss", "0.35", "--trained", "256:3"), ("--trained", "--target-loss")),
    ],
)
def test_invalid_input_is_refused(
    plan: Plan, profile: Path, options: tuple[str, ...], why: tuple[str, ...]
) -> None:
    check_message(plan(str(profile), *three(profile.parent, noise_law), *options).refusal(), *why)


def test_a_profile_without_runs_has_no_target(plan: Plan, profile: Path) -> None:
    assert "no run was given" in plan(str(profile), "--target-loss", "0.35").refusal()


def test_a_run_that_is_given_twice_counts_once(
    plan: Plan, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = three(profile.parent, noise_law)
    monkeypatch.chdir(profile.parent)
    again = [str(Path("256")), str(Path(runs[1]) / "trace.jsonl")]

    found = plan(str(profile), *runs, *again, "--target-loss", "0.35", "--json").json()

    assert [one["batch"] for one in found["trainings"]] == list(BATCHES)
