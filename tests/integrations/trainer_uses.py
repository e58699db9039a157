"""Uses of transformers' Trainer beyond its loop, as ranks of one process group run them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler
from transformers import Trainer, TrainingArguments
from transformers.training_args import ParallelMode

from evenstride.integrations.transformers import EvenTrainer, EvenTrainerMixin
from tests.integrations.accelerate_states import sharded
from tests.integrations.trainer_cases import (
    MODELS,
    SAMPLES,
    Noted,
    Plain,
    Run,
    Weighted,
    arguments,
    built,
    digits,
    flat,
    launched,
    llama,
    outcome,
    outcomes,
    t5,
    texts,
)


def evaluated(rank: int, folder: str, *, stock: bool) -> dict[str, Any]:
    """Return what evaluations and predictions of an untrained and a trained model come to."""
    found = {}
    with launched(rank):
        for model in ("plain", "t5", "llama"):
            run = Run(model, batch=10 if stock else 5, stock=stock)
            trainer, _, _ = built(run, f"{folder}/{model}")
            trainer.args.per_device_eval_batch_size = 23 if stock else 3
            trainer.compute_metrics = right
            trainer.args.include_for_metrics = ["inputs", "loss"] if model == "plain" else []
            rest = MODELS[model][1](23)
            before = trainer.evaluate(rest)
            rest.read.clear()
            trainer.evaluate(rest)
            trainer.train()
            read = [*rest.read]
            after = trainer.evaluate(rest, metric_key_prefix="later")
            predicted = trainer.predict(rest)
            logits = predicted.predictions
            found[model] = {
                "before": plain_numbers(before),
                "after": plain_numbers(after),
                "read": read,
                "logits": logits[0] if isinstance(logits, tuple) else logits,
                "labels": predicted.label_ids,
                "test": plain_numbers(predicted.metrics),
                "count": trainer.state.global_step,
            }
            if not stock:
                trainer.stride.close()
    return found


def right(predicted: Any) -> dict[str, float]:
    """Return metrics that depend on every sample and on their order."""
    logits, labels = predicted.predictions, predicted.label_ids
    logits = logits[0] if isinstance(logits, tuple) else logits
    places = np.arange(len(labels)).reshape(-1, *[1] * (labels.ndim - 1))
    found = {"hits": float(((logits.argmax(-1) == labels) * (places + 1)).sum())}
    if predicted.inputs is not None:
        found["inputs"] = float((predicted.inputs.sum(1) * places.ravel()).sum())
        found["mean_loss"] = float(predicted.losses.mean())
        found["number"] = len(predicted.losses)
    return found


def plain_numbers(metrics: dict[str, Any]) -> dict[str, float]:
    times = ("runtime", "per_second", "time")
    return {k: float(v) for k, v in metrics.items() if not k.endswith(times)}


def tokenizer() -> Any:
    """Return a tokenizer of 50 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(2, 50)} | {"<pad>": 0, "<end>": 1}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<end>", unk_token="<pad>"
    )


def tuned(rank: int, folder: str, *, stock: bool) -> dict[str, Any]:
    """Return what TRL's SFTTrainer comes to, with LoRA and without."""
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM")
    found = {}
    with launched(rank):
        for name, peft in (("full", None), ("lora", lora)):
            torch.manual_seed(5)
            noted = Noted()
            trainer = fine_tuner(f"{folder}/{name}", peft, noted, stock=stock)
            trainer.train()
            found[name] = {
                "weights": flat(trainer.model),
                "gradients": noted.gradients,
                "log": trainer.state.log_history,
                "evaluated": plain_numbers(trainer.evaluate()),
            }
            if not stock:
                found[name]["count"] = trainer.mean_over
                found[name]["shares"] = trainer.stride.shares
                trainer.stride.close()
    return found


def fine_tuner(folder: str, peft: Any, noted: Noted, *, stock: bool) -> Any:
    import datasets
    import trl

    class EvenSFT(EvenTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
        pass

    made = [s["input_ids"][s["attention_mask"].bool()].tolist() for s in texts().samples]
    data = datasets.Dataset.from_dict({"input_ids": made})
    config = trl.SFTConfig(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=6 if stock else 2,
        gradient_accumulation_steps=2 if stock else 3,
        train_sampling_strategy="sequential",
        max_steps=4,
        learning_rate=0.1,
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        activation_checkpointing=False,
        bf16=False,
        dataloader_pin_memory=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    options: dict[str, Any] = {} if stock else {"policy": "static:2,10"}
    return (trl.SFTTrainer if stock else EvenSFT)(
        model=llama(),
        args=config,
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer(),
        peft_config=peft,
        callbacks=[noted],
        **options,
    )


def resumed(rank: int, folder: str, checkpoint: str, *, more: dict[str, Any]) -> dict[str, Any]:
    """Train to the end, with saves on the way; from a checkpoint if one is given."""
    world = torch.distributed.get_world_size()
    run = Run(
        "llama",
        batch=2,
        accumulate=2,
        shares="uniform" if world > 2 else "static:3,9" if world > 1 else "",
        args={
            "train_sampling_strategy": "random",
            "optim": "adamw_torch",
            "learning_rate": 0.01,
            "save_strategy": "steps",
            "save_steps": 4,
            "logging_steps": 1,
            "include_num_input_tokens_seen": "non_padding",
            **more,
        },
        options={"global_batch": 12} if not checkpoint else {},
        resume=checkpoint or None,
    )
    return outcome(rank, run, folder)


FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "cpu_ram_efficient_loading": False}}


def fully_sharded(rank: int, runs: dict[str, Run], folder: str) -> dict[str, Any]:
    """Return what runs come to whose models FSDP2 shards."""
    with patch.dict(os.environ), pytest.MonkeyPatch.context() as patched:
        sharded(patched)
        sharding = {
            name: replace(run, args={**run.args, **copy.deepcopy(FSDP2)})
            for name, run in runs.items()
        }
        return outcomes(rank, sharding, folder)


class Sum(Plain):
    """A network whose loss is a sum over the batch."""

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = super().forward(pixels, labels)
        if labels is not None:
            outputs["loss"] = outputs["loss"] * len(labels)
        return outputs


class Streamed(IterableDataset[Any]):
    """Samples without indices."""

    def __iter__(self) -> Iterator[Any]:
        return iter(digits().samples)


REFUSED: dict[str, dict[str, Any]] = {
    "split": {"accelerator_config": {"split_batches": True}},
    "dispatch": {"accelerator_config": {"dispatch_batches": True}},
    "auto": {"auto_find_batch_size": True},
    "length": {"train_sampling_strategy": "group_by_length"},
    "skip": {"ignore_data_skip": True},
}


def refused(rank: int, folder: str) -> dict[str, str]:
    """Return the errors of what a trainer does not support, or ``no error``."""

    def begun(*, train: bool = False, change: Callable[[Any], object] = id, **more: Any) -> None:
        given: dict[str, Any] = {"model": Plain(), "train_dataset": digits()} | more
        args = given.pop("args", {})
        made = built_with(args, folder, change=change, **given)
        if train:
            made.train()

    found = {}
    with launched(rank):
        for name, args in REFUSED.items():
            found[name] = refusal(lambda: begun(args=args))  # noqa: B023
        for name, change in CHANGED.items():
            found[name] = refusal(lambda: begun(change=change))  # noqa: B023
        found["batch"] = refusal(lambda: begun(global_batch="auto"))
        found["mode"] = refusal(lambda: begun(sync="delayed"))
        found["stream"] = refusal(
            lambda: begun(train=True, train_dataset=Streamed(), args={"max_steps": 3})
        )
        found["sum"] = refusal(lambda: begun(train=True, model=Sum()))
        found["classes"] = refusal(lambda: begun(train=True, kind=Weighted))
        found["order"] = refusal(lambda: begun(train=True, kind=Ordered))
        found["replacement"] = refusal(lambda: begun(train=True, kind=Replacing))
    return found


class Ordered(EvenTrainer):
    """A trainer with a sampler of its own."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)


class Replacing(EvenTrainer):
    """A trainer that may train a sample several times in an epoch."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return RandomSampler(digits(), replacement=True)


class Changed:
    """Turns a setting of a trainer into one that this machine cannot have."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def __call__(self, trainer: Any) -> None:
        *path, last = self.name.split(".")
        for part in path:
            trainer = getattr(trainer, part)
        setattr(trainer, last, self.value)


class SageMakerArguments(TrainingArguments):  # type: ignore[misc]
    """What arguments are under SageMaker's model parallelism."""

    parallel_mode = ParallelMode.SAGEMAKER_MODEL_PARALLEL


CHANGED = {
    "deepspeed": Changed("is_deepspeed_enabled", True),
    "gpus": Changed("args._n_gpu", 2),
    "tpu": Changed("accelerator.state.distributed_type", DistributedType.XLA),
    "fsdp on tpu": Changed("is_fsdp_xla_enabled", True),
    "megatron": Changed("accelerator.state.distributed_type", DistributedType.MEGATRON_LM),
    "sagemaker": Changed("args.__class__", SageMakerArguments),
    "sharded loading": Changed("is_distributed_loading_by_transformers", True),
    "fsdp": Changed("accelerator.state.fsdp_plugin", SimpleNamespace(fsdp_version=1)),
    "parallel": Changed("accelerator.state.parallelism_config", ParallelismConfig(tp_size=2)),
    "context": Changed("accelerator.state.parallelism_config", ParallelismConfig(cp_size=2)),
}


def built_with(
    args: dict[str, Any], folder: str, *, change: Any, kind: Any = EvenTrainer, **options: Any
) -> Any:
    """Return a trainer of which a setting is changed before evenstride checks it."""
    create = Trainer.__init__

    def created(trainer: Any, *given: Any, **named: Any) -> None:
        create(trainer, *given, **named)
        change(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "__init__", created)
        return kind(args=arguments(Run(args=args), folder), **options)


def refusal(run: Callable[[], object]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Unequal(Trainer):  # type: ignore[misc]
    """A Trainer with the unequal batches of static:3,7, and without evenstride."""

    def get_train_dataloader(self) -> Any:
        first, last = (0, 3) if self.args.process_index == 0 else (3, 10)
        if self.args.world_size == 1:
            first, last = 0, 10
        batches = [list(range(at + first, at + last)) for at in (0, 10, 20)]
        return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)


def without_us(rank: int, folder: str) -> dict[str, Any]:
    """Return the first gradient of each model on unequal batches, without evenstride."""
    found = {}
    with launched(rank):
        for model in ("plain", "bert", "llama"):
            torch.manual_seed(5)
            noted = Noted()
            made, rows = MODELS[model]
            args = arguments(Run(batch=5, args={"max_steps": 1}), folder)
            Unequal(made(), args, train_dataset=rows(), callbacks=[noted]).train()
            found[model] = noted.gradients[0]
    return found


def sequences(rank: int, folder: str, *, stock: bool) -> dict[str, Any]:
    """Return what a Seq2SeqTrainer comes to that generates in its evaluation."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    class EvenSequences(EvenTrainerMixin, Seq2SeqTrainer):  # type: ignore[misc]
        pass

    def same(predicted: Any) -> dict[str, float]:
        labels = predicted.label_ids
        found = predicted.predictions[:, : labels.shape[1]]
        return {"sum": float((found * np.arange(1, len(found) + 1)[:, None]).sum())}

    with launched(rank):
        torch.manual_seed(5)
        options: dict[str, Any] = {} if stock else {"policy": "static:3,9"}
        args = Seq2SeqTrainingArguments(
            output_dir=folder, use_cpu=True, report_to=[], disable_tqdm=True, max_steps=3,
            per_device_train_batch_size=12 if stock else 2,
            gradient_accumulation_steps=1 if stock else 3, predict_with_generate=True,
            per_device_eval_batch_size=23 if stock else 3, generation_max_length=12,
            train_sampling_strategy="sequential", optim="sgd", learning_rate=0.1,
            dataloader_pin_memory=False, save_strategy="no",
        )  # fmt: skip
        trainer = (Seq2SeqTrainer if stock else EvenSequences)(
            model=t5(), args=args, train_dataset=texts(targets=True), compute_metrics=same,
            eval_dataset=texts(23, targets=True), processing_class=tokenizer(), **options,
        )  # fmt: skip
        trainer.train()
        found = {"metrics": plain_numbers(trainer.evaluate()), "weights": flat(trainer.model)}
        found["generated"] = trainer.predict(texts(23, targets=True)).predictions
        if not stock:
            trainer.stride.close()
    return found


def loaded(rank: int, folder: str) -> dict[str, Any]:
    """Return runs with loader processes and with shares by length; the same for any ranks."""
    world = torch.distributed.get_world_size()
    processes = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    by_length = {"train_sampling_strategy": "batch_rebalance"}
    options: dict[str, Any] = {"options": {"global_batch": 12}, "shares": "static:3,9"}
    return outcomes(
        rank,
        {
            "processes": Run(
                "bert", 3, 2, double=True, **options,
                args={"train_sampling_strategy": "random"} | (processes if world > 1 else {}),
            ),
            "dropped": Run(
                "bert", 3, 2, double=True, **options, args={"dataloader_drop_last": True}
            ),
            "by length": Run("llama", 3, 2, **options, args=by_length),
        },
        folder,
    )  # fmt: skip


def example(rank: int, folder: str) -> list[dict[str, Any]]:
    """Return the evaluations of two epochs of the example, with the same global batch."""
    from examples import transformers_trainer

    world = torch.distributed.get_world_size()
    small = ["--cpu", "--epochs", "2", "--accumulate", "1", "--batch", str(128 // world)]
    with launched(rank):
        trainer = transformers_trainer.main(transformers_trainer.arguments().parse_args(small))
    return [one for one in trainer.state.log_history if "eval_loss" in one]
