"""The noise of the gradient is measured on real ranks, and training does not notice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenstride.core.gradients.noise_scale import (
    GradientNorms,
    NoiseEstimate,
    NoiseOfRun,
    StepParts,
)
from evenstride.testing import RankPool
from evenstride.trace.decision_replay import replay
from evenstride.trace.read import read_noise, read_records
from tests.messages import check_message
from tests.multiproc.noisy import SCALE, Run, Truth, refused, train, truths

CASES = {
    "plain": Run(),
    "gradients that are views of buckets": Run(view=True),
    "a static graph": Run(static_graph=True),
    "views, micro-batches": Run(view=True, micro=7),
    "views, set to zero in place": Run(view=True, in_place=True),
    "parameters that some batches do not reach": Run(branches=True, micro=7),
    "parameters that some batches do not reach, in views": Run(branches=True, micro=7, view=True),
    "a share of 0": Run("static:0,24,40"),
    "tokens": Run(kind="tokens", micro=9),
    "tokens, given to scale": Run(kind="tokens-argument"),
    "memory for less": Run(fits=11),
    "memory for less, in micro-batches": Run(fits=5, micro=7, view=True),
    "a gradient scaler": Run(scaler=True),
    "every third step": Run(every=3, steps=7),
    "parameter servers": Run(sync="bsp-ps(servers=2)", micro=7),
    "parameter servers, a share of 0": Run("static:0,24,40", sync="bsp-ps"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_rank_reports_both_norms_and_training_is_unchanged(ranks: RankPool, name: str) -> None:
    run = CASES[name]

    everywhere = ranks.run(train, 3, run)
    plain = ranks.run(train, 3, replace(run, every=0))

    for mine, other in zip(everywhere, plain, strict=True):
        assert mine["weights"] == other["weights"], "bit for bit"
        assert mine["seen"] == other["seen"], "by hooks of the user"
        assert other["noise"] is None
    assert min(everywhere[1]["seen"]) > 0
    expected = truths(run, [found["ids"] for found in everywhere])
    for rank, found in enumerate(everywhere):
        _check_reported(run, rank, found["reported"], expected)


def _check_reported(run: Run, rank: int, reported: list[StepParts], expected: list[Truth]) -> None:
    unit = SCALE**2 if run.scaler else 1.0
    if not expected[0].weights[rank]:
        assert not reported, "a rank without samples has nothing to tell"
        return
    measured = [step for step in range(run.steps) if step % run.every == run.every - 1]
    assert [parts.step for parts in reported] == measured
    for parts in reported:
        truth = expected[parts.step]
        weight, squared = truth.weights[rank], truth.squared[rank]
        assert (parts.parts, parts.weight) == (1, weight)
        assert parts.batch == sum(truth.weights)
        assert parts.local == pytest.approx(unit * weight * squared, rel=1e-9)
        assert parts.mean == pytest.approx(unit * truth.mean, rel=1e-9)
        assert parts.loss == pytest.approx(weight * truth.losses[rank], rel=1e-9)


def test_there_are_hooks_in_measured_steps_only(ranks: RankPool) -> None:
    found = ranks.run(train, 3, Run("static:0,24,40", every=3, steps=7))

    # Waits in reentrant backward passes take one hook, and one per parameter in the first step.
    assert found[0]["hooks"] == [4] + [1] * 6, "a rank without samples measures nothing"
    assert found[1]["hooks"] == found[2]["hooks"] == [4, 1, 5, 1, 1, 5, 1]


def test_the_leader_puts_together_what_the_ranks_tell(ranks: RankPool, tmp_path: Path) -> None:
    run = Run(every=2, heard=3, trace=str(tmp_path / "trace.jsonl"))

    everywhere = ranks.run(train, 3, run)

    recorded = list(read_noise(tmp_path))
    losses = [one["loss"] for one in read_records(tmp_path) if one["kind"] == "noise"]
    estimate = NoiseEstimate()
    for (step, norms), loss in zip(recorded, losses, strict=True):
        parts = [parts for found in everywhere for parts in found["reported"] if parts.step == step]
        local = sum(one.local for one in parts) / 64
        assert (norms.parts, norms.batch, norms.mean) == (3, 64, parts[0].mean)
        assert norms.local == pytest.approx(local, rel=1e-12)
        assert loss == pytest.approx(sum(one.loss for one in parts) / 64, rel=1e-12)
        estimate = estimate.after(norms)
    _check_figures(everywhere[0]["figures"], recorded, estimate, run)
    check_message(everywhere[1]["noise"], "rank 0")
    assert replay(tmp_path).identical, "no decision depends on it"


def _check_figures(
    figures: Any, recorded: list[tuple[int, GradientNorms]], estimate: NoiseEstimate, run: Run
) -> None:
    steps, scale = [step for step, _ in recorded], estimate.scale()
    assert len(steps) >= run.heard
    assert steps == list(range(1, 2 * len(steps), 2)), "every second, none left out"
    assert (figures["every"], figures["steps"], figures["unit"]) == (2, len(steps), "samples")
    assert figures["noise"] == pytest.approx(estimate.noise, rel=1e-12)
    assert figures["signal"] == pytest.approx(estimate.signal, rel=1e-12)
    assert figures["gain"] == pytest.approx(estimate.gain, rel=1e-12)
    assert figures["scale_low"] == pytest.approx(scale.low, rel=1e-12)
    assert figures["why"] == ""


def test_a_gradient_that_is_not_finite_is_left_out(ranks: RankPool) -> None:
    everywhere = ranks.run(train, 3, Run(overflows=2))

    known, whole = NoiseOfRun().hear(parts for found in everywhere for parts in found["reported"])
    assert [parts.step for parts in whole] == [0, 1, 3]
    assert not known.open


def test_gradients_from_before_the_step_spoil_the_measurement(ranks: RankPool) -> None:
    found = ranks.run(train, 3, Run(kept=True))[0]

    assert [parts.step for parts in found["reported"]] == [0], "there were none before the first"


def test_an_engine_of_which_nothing_is_known_is_not_measured(ranks: RankPool) -> None:
    found = ranks.run(train, 3, Run(engine="own"))[0]

    assert not found["reported"]
    assert found["hooks"] == [4] * 4, "its own, and none of ours"
    check_message(found["noise"])


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("fsdp", ("ConfigError", "noise_every", "watch()")),
        ("others", ("RanksDisagree", "noise_every", "Stride()")),
    ],
)
def test_noise_that_cannot_be_measured_is_refused_on_every_rank(
    ranks: RankPool, what: str, says: tuple[str, ...]
) -> None:
    one, other = ranks.run(refused, 2, what)

    check_message(one, *says)
    assert one == other
