"""`EvenTrainer` trains as transformers' Trainer does in one process on the global batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from evenstride.testing import RankPool
from tests.integrations import trainer_cases
from tests.integrations.trainer_cases import SAMPLES, Run, error

EXACT, SINGLE = 1e-12, 1e-6  # relative errors of gradients in 64 and in 32 bits
SMOOTH = {"label_smoothing_factor": 0.1}
COUNTED = {"include_num_input_tokens_seen": "non_padding"}
CHECKPOINTED = {"gradient_checkpointing": True}

# Two ranks with unequal shares, each with the same training in one process of transformers' own.
CASES = {
    "samples": Run("plain", batch=5, double=True),
    "samples, accumulated": Run("plain", 2, 3, shares="static:3,9", double=True),
    "ignores num_items": Run("bert", batch=5, double=True, args=COUNTED),
    "ignores num_items, accumulated": Run("bert", 2, 3, shares="static:3,9", double=True),
    "smoothed": Run("bert", batch=5, double=True, args=SMOOTH),
    "a loss of its own": Run("plain", 3, 2, shares="static:1,11", double=True, trainer="weighted"),
    "tokens": Run("llama", batch=5, args=COUNTED),
    "tokens, accumulated": Run("llama", 2, 3, shares="static:3,9", args=COUNTED),
    "tokens, smoothed": Run("llama", batch=5, args=SMOOTH),
    "unshifted count": Run("gpt2", 2, 3, shares="static:3,9"),
    "labels": Run("t5", 2, 3, shares="static:3,9"),
    "labels, smoothed": Run("t5", batch=5, args=SMOOTH),
    "a share of 0": Run("llama", 2, 3, shares="static:0,12"),
}
FOUND = {
    "samples": "samples",
    "ignores num_items": "samples",
    "smoothed": "num_items_in_batch",
    "a loss of its own": "weight_fn",
    "tokens": "num_items_in_batch",
    "unshifted count": "num_items_in_batch",
    "labels": "labels",
    "labels, smoothed": "num_items_in_batch",
}


def in_one_process(run: Run) -> Run:
    """Return the run of transformers' Trainer with the same global batch."""
    return replace(run, stock=True, batch=run.batch * run.accumulate * 2, accumulate=1)


@pytest.fixture(scope="module")
def told(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What both ranks came to in every case, and what one process did."""
    folder = tmp_path_factory.mktemp("cases")
    alone = {name: in_one_process(run) for name, run in CASES.items()}
    by_one = ranks.run(trainer_cases.outcomes, 1, alone, str(folder / "one"), timeout_s=100)
    by_two = ranks.run(trainer_cases.outcomes, 2, CASES, str(folder / "two"), timeout_s=100)
    return by_two, by_one[0]


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_is_that_of_one_process(told: Any, name: str) -> None:
    two, one = (told[0][0][name], told[1][name])
    limit = EXACT if CASES[name].double else SINGLE
    smooth = "smoothed" in name  # the smoother of transformers adds up in 32 bits

    assert error(two["gradients"][0], one["gradients"][0]) <= limit
    assert len(two["gradients"]) == len(one["gradients"])
    for mine, wanted in zip(two["gradients"], one["gradients"], strict=True):
        assert error(mine, wanted) <= (1e-5 if limit == SINGLE or smooth else limit)
    assert error(two["weights"], one["weights"]) <= (SINGLE if limit == SINGLE or smooth else limit)
    assert (two["weights"] == told[0][1][name]["weights"]).all(), "all ranks have the same weights"


@pytest.mark.parametrize("name", CASES)
def test_a_trainer_reports_what_one_process_does(told: Any, name: str) -> None:
    two, one = (told[0][0][name], told[1][name])

    logs = [{k: v for k, v in log.items() if not k.startswith("train_")} for log in two["log"]]
    for mine, wanted in zip(logs, one["log"], strict=True):
        assert mine == pytest.approx({k: wanted[k] for k in mine}, rel=1e-4, abs=1e-6)
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)
    assert two["train_loss"] == pytest.approx(told[0][1][name]["train_loss"], rel=1e-6)
    assert (two["steps"], two["epochs"]) == (one["steps"], one["epochs"])
    assert two["tokens"] == one["tokens"]
    assert two["substeps"] == (CASES[name].accumulate - 1) * two["steps"]


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_unequal_shares_and_each_sample_once_per_epoch(told: Any, name: str) -> None:
    placeholders = CASES[name].shares in ("static:0,12", "static:1,11")
    read = [Counter(of[name]["read"]) for of in told[0]]

    assert told[0][0][name]["shares"] == tuple(map(int, CASES[name].shares[7:].split(",")))
    assert read[0].total() < 0.6 * read[1].total()
    if not placeholders:
        assert read[0] + read[1] == Counter(dict.fromkeys(range(SAMPLES), 2))


@pytest.mark.parametrize(("name", "count"), FOUND.items())
def test_what_the_loss_is_a_mean_over_is_found_out(told: Any, name: str, count: str) -> None:
    assert told[0][0][name]["count"] == told[0][1][name]["count"] == count
