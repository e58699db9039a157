"""Models, data and runs of transformers' Trainer, as ranks of one process group run them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate.state import AcceleratorState
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

import evenstride
from evenstride.integrations.transformers import EvenTrainer, EvenTrainerMixin

SAMPLES = 32
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class Rows(Dataset[Any]):
    """Samples of which it is noted which are read."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.samples, self.read = samples, list[int]()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return self.samples[index]


def digits(count: int = SAMPLES) -> Rows:
    """Return images of digits with their labels."""
    images, labels = load_digits(return_X_y=True)
    numbers = torch.tensor(images / 16, dtype=torch.get_default_dtype())
    return Rows(
        [{"pixels": numbers[i], "labels": torch.tensor(int(labels[i]))} for i in range(count)]
    )


def texts(count: int = SAMPLES, vocabulary: int = 50, targets: bool = False) -> Rows:
    """Return sequences of unequal numbers of tokens, padded to 12 with ignored labels."""
    made = torch.Generator().manual_seed(3)
    samples = []
    for _ in range(count):
        length = int(torch.randint(3, 12, (1,), generator=made))
        ids = torch.randint(1, vocabulary, (12,), generator=made)
        mask = (torch.arange(12) < length).long()
        sample = {"input_ids": ids * mask, "attention_mask": mask}
        sample["labels"] = torch.where(mask.bool(), ids, -100)
        if targets:
            sample["labels"] = sample["labels"].flip(0)
            sample["decoder_input_ids"] = sample["labels"].roll(1).clamp(min=0)
        samples.append(sample)
    return Rows(samples)


def sentences(count: int = SAMPLES) -> Rows:
    """Return token sequences with one label each."""
    rows = texts(count)
    for sample in rows.samples:
        sample["labels"] = sample["input_ids"].sum() % 3
    return rows


class Plain(nn.Module):
    """A network that takes no keyword arguments for its loss, which is a mean over samples."""

    main_input_name = "pixels"

    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.PretrainedConfig()
        self.net = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(pixels)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Weighted(EvenTrainer):
    """A trainer with a loss of its own, which the classes weight."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> Any:
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs["logits"], inputs["labels"], weight=class_weights())
        return (loss, outputs) if return_outputs else loss


class StockWeighted(Trainer):
    compute_loss = Weighted.compute_loss


def class_weights() -> Tensor:
    return torch.linspace(1, 3, 10)


def gpt2(**more: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **more,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


MODELS: dict[str, tuple[Callable[[], Any], Callable[..., Rows]]] = {
    "plain": (Plain, digits),
    "bert": (bert, sentences),
    "gpt2": (gpt2, texts),
    "llama": (llama, texts),
    "t5": (t5, lambda *a: texts(*a, targets=True)),
}


class Noted(TrainerCallback):  # type: ignore[misc]
    """Notes the gradient of every update, and the progress that a Trainer reports."""

    def __init__(self) -> None:
        self.gradients: list[Any] = []
        self.epochs: list[float] = []
        self.substeps = 0

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        grads = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(grads).numpy().copy())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.epochs.append(state.epoch)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.substeps += 1


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a Trainer; ``stock`` runs transformers' own."""

    model: str = "plain"
    batch: int = 3
    accumulate: int = 1
    stock: bool = False
    shares: str = "static:3,7"
    double: bool = False
    trainer: str = ""
    options: dict[str, Any] = field(default_factory=dict)  # of the trainer
    args: dict[str, Any] = field(default_factory=dict)
    resume: str | None = None
    samples: int = SAMPLES


@contextlib.contextmanager
def launched(rank: int) -> Iterator[None]:
    """Look like a rank that torchrun has started."""
    world = torch.distributed.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 1,  # the process group is there already
            "ACCELERATE_USE_CPU": "true",
        }.items():
            patch.setenv(name, str(value))
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def arguments(run: Run, folder: str) -> Any:
    given = {
        "max_grad_norm": 0.5,
        "num_train_epochs": 2,
        "learning_rate": 0.1,
        "optim": "sgd",
        "logging_steps": 3,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "lr_scheduler_type": "linear",
        **run.args,
    }
    return TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=run.batch,
        gradient_accumulation_steps=run.accumulate,
        dataloader_pin_memory=False,
        **given,
    )


def built(run: Run, folder: str) -> tuple[Any, Rows, Noted]:
    """Return a trainer, its data, and what is noted about it."""
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64 if run.double else torch.float32)
    model, rows = MODELS[run.model]
    data, noted = rows(run.samples), Noted()
    kind = {"": EvenTrainer, "weighted": Weighted}[run.trainer]
    options = {"policy": run.shares} | run.options
    if torch.distributed.get_world_size() == 1:
        del options["policy"]
    if run.stock:
        kind = {"": Trainer, "weighted": StockWeighted}[run.trainer]
        options = {}
    if run.trainer == "weighted" and not run.stock:
        options["weight_fn"] = lambda inputs: float(class_weights()[inputs["labels"]].sum())
    made = kind(
        model=model(),
        args=arguments(run, folder),
        train_dataset=data,
        callbacks=[noted],
        **options,
    )
    data.read.clear()
    return made, data, noted


@contextlib.contextmanager
def forgetting(data: Rows) -> Iterator[None]:
    """Forget the samples that are read before the first step."""
    begin = evenstride.Stride.watch

    def watch(stride: Any, model: Any, **options: Any) -> Any:
        data.read.clear()
        return begin(stride, model, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evenstride.Stride, "watch", watch)
        yield


def outcome(rank: int, run: Run, folder: str) -> dict[str, Any]:
    """Run a trainer; return what it came to, as plain data."""
    with launched(rank):
        try:
            trainer, data, noted = built(run, folder)
            with forgetting(data):
                result = trainer.train(run.resume)
            stride = getattr(trainer, "_stride", None)
            told = {
                "weights": flat(trainer.model),
                "gradients": noted.gradients,
                "epochs": noted.epochs,
                "substeps": noted.substeps,
                "read": [*data.read],
                "log": trainer.state.log_history,
                "steps": trainer.state.global_step,
                "train_loss": result.training_loss,
                "shares": stride and stride.shares,
                "count": getattr(trainer, "_loss_count", None) and trainer._loss_count.name,
                "tokens": trainer.state.num_input_tokens_seen,
            }
            if stride:
                stride.close()
            return told
        finally:
            torch.set_default_dtype(torch.float32)


def outcomes(rank: int, runs: dict[str, Run], folder: str) -> dict[str, Any]:
    return {name: outcome(rank, run, os.path.join(folder, name)) for name, run in runs.items()}


def flat(model: Any) -> Any:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()]).numpy().copy()


def error(found: Any, wanted: Any) -> float:
    """Return the largest difference relative to the largest value."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def evaluated(rank: int, folder: str, *, stock: bool) -> dict[str, Any]:
    """Return what evaluations and predictions of an untrained and a trained model come to."""
    found = {}
    with launched(rank):
        for model in ("plain", "t5", "llama"):
            run = Run(model, batch=10 if stock else 5, stock=stock)
            trainer, data, _ = built(run, os.path.join(folder, model))
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
    import datasets
    import trl
    from peft import LoraConfig

    class EvenSFT(EvenTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
        pass

    rows = texts()
    data = datasets.Dataset.from_dict(
        {"input_ids": [s["input_ids"][s["attention_mask"].bool()].tolist() for s in rows.samples]}
    )
    found = {}
    with launched(rank):
        for name, peft in (("full", None), ("lora", LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM"))):  # noqa: E501
            torch.manual_seed(5)
            noted = Noted()
            config = trl.SFTConfig(
                output_dir=os.path.join(folder, name), use_cpu=True, report_to=[],
                per_device_train_batch_size=6 if stock else 2, gradient_accumulation_steps=2 if stock else 3,
                train_sampling_strategy="sequential", max_steps=4, learning_rate=0.1, optim="sgd",
                logging_steps=1, save_strategy="no", gradient_checkpointing=False, bf16=False, dataloader_pin_memory=False,
                disable_tqdm=True, dataset_kwargs={"skip_prepare_dataset": True}, eval_strategy="no",
            )  # fmt: skip
            kind = trl.SFTTrainer if stock else EvenSFT
            options = {} if stock else {"policy": "static:2,10"}
            trainer = kind(
                model=llama(), args=config, train_dataset=data, eval_dataset=data,
                processing_class=tokenizer(), peft_config=peft, callbacks=[noted], **options,
            )  # fmt: skip
            trainer.train()
            found[name] = {
                "weights": flat(trainer.model),
                "gradients": noted.gradients,
                "log": trainer.state.log_history,
                "evaluated": plain_numbers(trainer.evaluate()),
            }
            if not stock:
                found[name]["count"] = trainer._loss_count.name
                found[name]["shares"] = trainer.stride.shares
                trainer.stride.close()
    return found


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
            **COUNTED,
            **more,
        },
        options={"global_batch": 12} if not checkpoint else {},
        resume=checkpoint or None,
    )
    return outcome(rank, run, folder)


COUNTED = {"include_num_input_tokens_seen": "non_padding"}



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

    def begun(*, train: bool = False, change: Callable[[Any], None] = id, **more: Any) -> None:
        given = {"model": Plain(), "train_dataset": digits()} | more
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
        found["stream"] = refusal(
            lambda: begun(train=True, train_dataset=Streamed(), args={"max_steps": 3})
        )
        found["sum"] = refusal(lambda: begun(train=True, model=Sum()))
        found["classes"] = refusal(lambda: begun(train=True, kind=Weighted))
        found["order"] = refusal(lambda: begun(train=True, kind=Ordered))
    return found


class Ordered(EvenTrainer):
    """A trainer with a sampler of its own."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)


class Changed:
    """Turns a setting of a trainer into one that this machine cannot have."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def __call__(self, trainer: Any) -> None:
        *path, last = self.name.split(".")
        for part in path:
            trainer = getattr(trainer, part)
        setattr(trainer, last, self.value)


CHANGED = {
    "deepspeed": Changed("is_deepspeed_enabled", True),
    "gpus": Changed("args._n_gpu", 2),
    "tpu": Changed("is_fsdp_xla_enabled", True),
    "fsdp": Changed("accelerator.state.fsdp_plugin", SimpleNamespace(fsdp_version=1)),
    "parallel": Changed(
        "accelerator.state.parallelism_config",
        SimpleNamespace(tp_size=2, cp_size=1, sp_size=1),
    ),
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


class Unequal(Trainer):
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
        options = {} if stock else {"policy": "static:3,9"}
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
    options = {"options": {"global_batch": 12}, "shares": "static:3,9"}
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
