"""Models, data and runs of transformers' Trainer, as ranks of one process group run them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate.state import AcceleratorState
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import evenstride
from evenstride.integrations.transformers import EvenTrainer

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

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs["logits"], inputs["labels"], weight=class_weights())
        return (loss, outputs) if return_outputs else loss


class StockWeighted(Trainer):  # type: ignore[misc]
    compute_loss = Weighted.compute_loss


def weight_of(inputs: Any) -> float:
    return float(class_weights()[inputs["labels"]].sum())


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
    "t5": (t5, lambda count=SAMPLES: texts(count, targets=True)),
}


class Noted(TrainerCallback):  # type: ignore[misc]
    """Notes the gradient of every update, and the progress that a Trainer reports."""

    def __init__(self) -> None:
        self.gradients: list[Any] = []
        self.epochs: list[float] = []
        self.substeps = 0

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        grads = [whole(p.grad).flatten().double() for p in model.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(grads).numpy().copy())

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
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
        options["weight_fn"] = weight_of
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
            stride = None if run.stock else trainer.stride
            found = {
                "weights": flat(trainer.model),
                "gradients": noted.gradients,
                "epochs": noted.epochs,
                "substeps": noted.substeps,
                "read": [*data.read],
                "log": trainer.state.log_history,
                "steps": trainer.state.global_step,
                "train_loss": result.training_loss,
                "shares": stride and stride.shares,
                "count": None if run.stock else trainer.mean_over,
                "tokens": trainer.state.num_input_tokens_seen,
            }
            if stride:
                stride.close()
            return found
        finally:
            torch.set_default_dtype(torch.float32)


def outcomes(rank: int, runs: dict[str, Run], folder: str) -> dict[str, Any]:
    return {name: outcome(rank, run, f"{folder}/{name}") for name, run in runs.items()}


def flat(model: Any) -> Any:
    parts = [whole(p.detach()).flatten().double() for p in model.parameters()]
    return torch.cat(parts).numpy().copy()


def whole(tensor: Any) -> Any:
    """Return a tensor, or the whole of one that FSDP2 shards; collective then."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def error(found: Any, wanted: Any) -> float:
    """Return the largest difference relative to the largest value."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())
