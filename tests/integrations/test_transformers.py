"""`EvenTrainer` trains as transformers' Trainer does in one process on the global batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from evenstride.integrations.trainer_parts.loss_count import TriedLoss, assume_count
from evenstride.testing import RankPool
from tests.integrations import trainer_cases, trainer_uses
from tests.integrations.trainer_cases import SAMPLES, Run, error
from tests.messages import check_message

EXACT, SINGLE = 1e-12, 1e-6  # relative errors of gradients in 64 and in 32 bits
SMOOTH = {"label_smoothing_factor": 0.1}
COUNTED = {"include_num_input_tokens_seen": "non_padding"}
CHECKPOINTED = {"activation_checkpointing": True}
REENTRANT = {
    one: {"activation_checkpointing_kwargs": {"use_reentrant": one}} for one in (False, True)
}

# Two ranks with unequal shares, each with the same training in one process of transformers' own.
QUICK = {
    "samples": Run("bert", 2, 3, shares="static:3,9", double=True, args=COUNTED),
    "tokens": Run("llama", 2, 3, shares="static:3,9", args=COUNTED),
    "labels": Run("t5", batch=5),
    "a loss of its own": Run("plain", 3, 2, shares="static:1,11", double=True, trainer="weighted"),
}
SLOW = {
    "no keywords": Run("plain", batch=5, double=True),
    "no keywords, accumulated": Run("plain", 2, 3, shares="static:3,9", double=True),
    "samples, smoothed": Run("bert", batch=5, double=True, args=SMOOTH),
    "tokens, smoothed": Run("llama", batch=5, args=SMOOTH),
    "tokens counted in another way": Run("gpt2", 2, 3, shares="static:3,9"),
    "labels, accumulated": Run("t5", 2, 3, shares="static:3,9"),
    "labels, smoothed": Run("t5", batch=5, args=SMOOTH),
    "a share of 0": Run("llama", 2, 3, shares="static:0,12"),
    "checkpointed": Run("llama", 2, 3, shares="static:3,9", args=CHECKPOINTED | REENTRANT[False]),
    "checkpointed, reentrant": Run(
        "llama", 2, 3, shares="static:3,9", args=CHECKPOINTED | REENTRANT[True]
    ),
    "bf16": Run("llama", batch=5, args={"bf16": True}),
}
CASES = QUICK | SLOW
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
FOUND = {
    "samples": "samples",
    "tokens": "num_items_in_batch",
    "labels": "labels",
    "a loss of its own": "weight_fn",
    "no keywords": "samples",
    "samples, smoothed": "num_items_in_batch",
    "tokens counted in another way": "num_items_in_batch",
    "labels, smoothed": "num_items_in_batch",
}


def in_one_process(run: Run) -> Run:
    """Return the run of transformers' Trainer with the same global batch."""
    return replace(run, stock=True, batch=run.batch * run.accumulate * 2, accumulate=1)


class Outcomes:
    """What both ranks came to in every case, and what one process did."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._found: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {}

    def of(self, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the outcomes of both ranks and of one process; runs several cases at once."""
        if name not in self._found:
            cases = QUICK if name in QUICK else SLOW
            alone = {name: in_one_process(run) for name, run in cases.items()}
            one, two = (str(self._folder / name) for name in ("one", "two"))
            by_one = self._ranks.run(trainer_cases.outcomes, 1, alone, one, timeout_s=200)
            by_two = self._ranks.run(trainer_cases.outcomes, 2, cases, two, timeout_s=200)
            for case in cases:
                self._found[case] = [of[case] for of in by_two], by_one[0][case]
        return self._found[name]


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(ranks, tmp_path_factory.mktemp("cases"))


@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_is_that_of_one_process(outcomes: Outcomes, name: str) -> None:
    (two, other), one = outcomes.of(name)
    limit = EXACT if CASES[name].double else 0.02 if name == "bf16" else SINGLE
    # Rounding adds up; and the smoother of transformers computes in 32 bits.
    later = max(limit, 1e-5) if limit != EXACT or "smoothed" in name else limit

    assert error(two["gradients"][0], one["gradients"][0]) <= limit
    assert len(two["gradients"]) == len(one["gradients"])
    for mine, wanted in zip(two["gradients"], one["gradients"], strict=True):
        assert error(mine, wanted) <= later
    assert error(two["weights"], one["weights"]) <= later
    assert (two["weights"] == other["weights"]).all(), "all ranks have the same weights"


@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", NAMES)
def test_a_trainer_reports_what_one_process_does(outcomes: Outcomes, name: str) -> None:
    (two, other), one = outcomes.of(name)
    later = 0.01 if name == "bf16" else 1e-4

    logs = [{k: v for k, v in log.items() if not k.startswith("train_")} for log in two["log"]]
    for mine, wanted in zip(logs, one["log"], strict=True):
        assert mine == pytest.approx({k: wanted[k] for k in mine}, rel=later, abs=1e-6)
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=later)
    assert two["train_loss"] == pytest.approx(other["train_loss"], rel=1e-6)
    assert (two["steps"], two["epochs"]) == (one["steps"], one["epochs"])
    assert two["tokens"] == one["tokens"]
    assert two["substeps"] == (CASES[name].accumulate - 1) * two["steps"]


@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_train_unequal_shares_and_each_sample_once_per_epoch(
    outcomes: Outcomes, name: str
) -> None:
    first, second = outcomes.of(name)[0]
    read = [Counter(of["read"]) for of in (first, second)]
    shares = CASES[name].shares.removeprefix("static:")

    assert ",".join(map(str, first["shares"])) == shares
    assert read[0].total() < 0.6 * read[1].total()
    if shares in ("3,9", "3,7"):  # the others have placeholders
        assert read[0] + read[1] == Counter(dict.fromkeys(range(SAMPLES), 2))


@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", NAMES)
def test_what_the_loss_is_a_mean_over_is_found_out(outcomes: Outcomes, name: str) -> None:
    if name in FOUND:
        assert [of["count"] for of in outcomes.of(name)[0]] == [FOUND[name]] * 2


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "ranks_after", [1, pytest.param(3, marks=pytest.mark.slow)], ids=["on one", "on three"]
)
def test_a_run_resumes_within_an_epoch_with_another_number_of_ranks(
    ranks: RankPool, tmp_path: Path, ranks_after: int
) -> None:
    start, go_on = (partial(trainer_uses.resumed, more={"max_steps": steps}) for steps in (6, 6))
    saved = str(tmp_path / "checkpoint-4")  # epochs have three updates: in the second one

    whole = ranks.run(start, 2, str(tmp_path), "", timeout_s=200)
    rest = ranks.run(go_on, ranks_after, str(tmp_path / "rest"), saved, timeout_s=200)

    for of in rest:
        assert error(of["weights"], whole[0]["weights"]) <= 1e-5
    read = Counter(index for of in rest for index in of["read"])
    assert read.total() == SAMPLES - 12
    assert set(read.values()) == {1}
    first = Counter(index for of in whole for index in of["read"])
    assert first == Counter(dict.fromkeys(range(SAMPLES), 2))
    fields = ("loss", "learning_rate", "epoch", "num_input_tokens_seen", "step")
    mine, wanted = (
        [[log[name] for name in fields] for log in of["log"] if "loss" in log]
        for of in (rest[0], whole[0])
    )
    assert mine == [pytest.approx(log, rel=1e-4) for log in wanted]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_models_that_fsdp2_shards_train_and_resume_as_in_one_process(
    ranks: RankPool, tmp_path: Path
) -> None:
    adam = {"optim": "adamw_torch", "max_steps": 6}  # torch loads no state of an SGD without one
    saving = {"save_strategy": "steps", "save_steps": 4}  # in the second epoch
    runs = {
        "samples": Run("plain", 2, 3, shares="static:3,9", double=True, args=adam | saving),
        "tokens": Run("llama", batch=5),
    }
    rest = replace(runs["samples"], resume=str(tmp_path / "two" / "samples" / "checkpoint-4"))
    one = {name: replace(in_one_process(run), args={}) for name, run in runs.items()}
    one["samples"] = replace(one["samples"], args=adam)

    alone = ranks.run(trainer_cases.outcomes, 1, one, str(tmp_path / "one"), timeout_s=200)[0]
    found = ranks.run(trainer_uses.fully_sharded, 2, runs, str(tmp_path / "two"), timeout_s=200)
    after = ranks.run(
        trainer_uses.fully_sharded, 2, {"rest": rest}, str(tmp_path / "rest"), timeout_s=200
    )

    assert {name: of["count"] for name, of in found[0].items()} == {
        "samples": "samples",
        "tokens": "num_items_in_batch",
    }
    for name, wanted in alone.items():
        for of in found:
            for mine, gradient in zip(of[name]["gradients"], wanted["gradients"], strict=True):
                assert error(mine, gradient) <= SINGLE
            assert error(of[name]["weights"], wanted["weights"]) <= SINGLE
    for of in after:
        assert error(of["rest"]["weights"], alone["samples"]["weights"]) <= SINGLE
        assert len(of["rest"]["gradients"]) == 2


@pytest.mark.parametrize(
    ("labels", "shifted", "name"),
    [
        (torch.zeros(8, dtype=torch.int64), False, "samples"),
        (torch.zeros(8, 4, dtype=torch.int64), False, "labels"),
        (torch.zeros(8, 4, dtype=torch.int64), True, "labels of next tokens"),
    ],
)
def test_a_sharded_model_that_counts_nothing_is_assumed_to_count_the_usual(
    labels: torch.Tensor, shifted: bool, name: str
) -> None:
    trainer = SimpleNamespace(model=torch.nn.Linear(1, 1))
    tried = TriedLoss(trainer, lambda *_: torch.tensor(0.0), lambda _: None, shifted, half=False)

    found = assume_count(tried, range(8), lambda _: {"labels": labels})

    assert found.name == name


@pytest.mark.timeout(420)
def test_an_evaluation_counts_each_sample_once(ranks: RankPool, tmp_path: Path) -> None:
    stock, ours = (partial(trainer_uses.evaluated, stock=one) for one in (True, False))

    alone = ranks.run(stock, 1, str(tmp_path / "one"), timeout_s=200)[0]
    found = ranks.run(ours, 2, str(tmp_path / "two"), timeout_s=200)

    for model, wanted in alone.items():
        for of in found:
            for when in ("before", "after", "test"):
                assert of[model][when] == pytest.approx(wanted[when], rel=1e-5), (model, when)
            assert error(of[model]["logits"], wanted["logits"]) <= 1e-5
            assert (of[model]["labels"] == wanted["labels"]).all()
        read = Counter(index for of in found for index in of[model]["read"])
        assert read == Counter(range(23))
        assert len(found[0][model]["read"]) < len(found[1][model]["read"]), "shares are unequal"


@pytest.mark.timeout(420)
def test_unsupported_settings_are_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(trainer_uses.refused, 2, str(tmp_path), timeout_s=200)

    assert first == second, "alike on every rank"
    for name, text in first.items():
        check_message(f"{name}: {text}", "ConfigError")


@pytest.mark.timeout(420)
def test_without_evenstride_unequal_batches_give_wrong_gradients(
    ranks: RankPool, tmp_path: Path
) -> None:
    alone = ranks.run(trainer_uses.without_us, 1, str(tmp_path / "one"), timeout_s=200)[0]
    found = ranks.run(trainer_uses.without_us, 2, str(tmp_path / "two"), timeout_s=200)[0]

    errors = {model: error(found[model], alone[model]) for model in found}
    assert errors["plain"] > 0.1, "ranks have equal weights, whatever they trained"
    assert errors["bert"] > 0.9, "and the Trainer takes the mean for a sum over all ranks"
    assert errors["llama"] <= SINGLE, "a Trainer counts tokens over all ranks itself"


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_sft_trains_as_in_one_process_and_counts_over_all_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    stock, ours = (partial(trainer_uses.tuned, stock=one) for one in (True, False))

    alone = ranks.run(stock, 1, str(tmp_path / "one"), timeout_s=200)[0]
    found = ranks.run(ours, 2, str(tmp_path / "two"), timeout_s=200)

    for name, wanted in alone.items():
        mine = found[0][name]
        assert mine["shares"] == (2, 10)
        assert mine["count"] == "num_items_in_batch"
        for gradient, expected in zip(mine["gradients"], wanted["gradients"], strict=True):
            assert error(gradient, expected) <= 1e-5
        assert error(mine["weights"], wanted["weights"]) <= SINGLE
        steps = [log for log in wanted["log"] if "loss" in log]
        fields = ("loss", "grad_norm", "num_tokens", "epoch")
        for log, expected in zip(mine["log"], steps, strict=False):
            assert [log[f] for f in fields] == pytest.approx(
                [expected[f] for f in fields], rel=1e-4
            )
        assert set(mine["evaluated"]) == set(wanted["evaluated"])


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_seq2seq_trainer_generates_for_each_sample_once(ranks: RankPool, tmp_path: Path) -> None:
    stock, ours = (partial(trainer_uses.sequences, stock=one) for one in (True, False))

    alone = ranks.run(stock, 1, str(tmp_path / "one"), timeout_s=200)[0]
    found = ranks.run(ours, 2, str(tmp_path / "two"), timeout_s=200)

    for of in found:
        assert error(of["weights"], alone["weights"]) <= SINGLE
        assert of["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)
        assert (of["generated"] == alone["generated"]).all()


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_options_of_the_loader_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    alone = ranks.run(trainer_uses.loaded, 1, str(tmp_path / "one"), timeout_s=200)[0]
    found = ranks.run(trainer_uses.loaded, 2, str(tmp_path / "two"), timeout_s=200)

    for name, wanted in alone.items():
        limit = EXACT if name != "by length" else 1e-5
        assert error(found[0][name]["weights"], wanted["weights"]) <= limit, name
        assert found[0][name]["steps"] == wanted["steps"]
        assert found[0][name]["log"][0]["loss"] == pytest.approx(wanted["log"][0]["loss"])
    assert found[0]["dropped"]["steps"] == 2 * (SAMPLES // 12)
    read = Counter(index for of in found for index in of["by length"]["read"])
    assert read == Counter(dict.fromkeys(range(SAMPLES), 2))


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_example_learns_alike_on_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    alone = ranks.run(trainer_uses.example, 1, str(tmp_path), timeout_s=200)[0]
    found = ranks.run(trainer_uses.example, 2, str(tmp_path), timeout_s=200)[0]

    assert len(alone) == 2
    assert alone[1]["eval_loss"] < alone[0]["eval_loss"]
    for one, of_both in zip(alone, found, strict=True):
        # BERT's dropout masks depend on the rank.
        assert of_both["eval_loss"] == pytest.approx(one["eval_loss"], rel=2e-2)
