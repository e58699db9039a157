"""A Trainer whose ranks train unequal shares of each global batch, with the exact gradient.

The Trainer's loop is unchanged. `EvenTrainerMixin` replaces its training data by `UpdateLoader`,
scales each loss before the backward pass, and evaluates every sample once over all ranks. All
methods of a Trainer that are overridden are here and in `trainer_parts.even_evaluation`. See
docs/how-to/transformers.md.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from evenstride.errors import ConfigError
from evenstride.integrations.trainer_parts.carried_options import Carried, carried
from evenstride.integrations.trainer_parts.even_evaluation import EvenEvaluation, overrides
from evenstride.integrations.trainer_parts.loss_count import (
    LossCount,
    TriedLoss,
    assume_count,
    find_count,
)
from evenstride.integrations.trainer_parts.trainer_refusals import refuse
from evenstride.integrations.trainer_parts.update_stream import (
    MicroStep,
    UpdateLoader,
    UpdateStream,
)
from evenstride.integrations.versions import warn_if_untested
from evenstride.runtime.stride import Stride

__all__ = ["EvenTrainer", "EvenTrainerMixin"]

_STATE = "evenstride"  # key in ``trainer_state.json``
_OURS = frozenset(inspect.signature(Stride).parameters) - {"global_batch"}


class EvenTrainerMixin(EvenEvaluation):
    """Unequal shares with the exact gradient, for a subclass of `transformers.Trainer`.

    Put it first: ``class EvenSFT(EvenTrainerMixin, SFTTrainer)``. Everything else stays as it is:
    arguments, callbacks, logs, checkpoints. With one process it trains like the Trainer.

    The share of a rank is split into micro-batches of at most ``per_device_train_batch_size``
    samples. If the class has a ``compute_loss`` of its own, which may contain collectives, every
    rank runs ``gradient_accumulation_steps`` micro-batches instead.

    A Trainer does not say what its loss is a mean over, so the model is tried with a few samples
    before the first step; see `LossCount`.

    Args:
        *args: Arguments of the Trainer.
        global_batch: Samples per update over all ranks. ``None`` for ``per_device_train_batch_size
            * gradient_accumulation_steps *`` the number of ranks, as in the Trainer; a resumed run
            keeps that of its checkpoint.
        weight_fn: What a batch, as the collator returns it, counts for in the loss: a sum of class
            weights, for example. ``None`` finds it out.
        **options: Arguments of the Trainer, and those of `Stride`: ``policy``, ``seed``, ``trace``,
            ``sinks``, ``max_share`` and others. ``seed`` is that of the Trainer by default.

    Raises:
        ConfigError: The Trainer has a setting that cannot be combined with unequal shares. In
            `train`: the data set has no indices, or the loss is a mean over something unknown.

    Cost:
        Up to five forward passes with eight samples, once per run.
    """

    def __init__(
        self,
        *args: Any,
        global_batch: int | None = None,
        weight_fn: Callable[[Any], float] | None = None,
        **options: Any,
    ) -> None:
        self._stride: Stride | None = None
        self._stride_options = {name: options.pop(name) for name in _OURS & options.keys()}
        super().__init__(*args, **options)
        warn_if_untested("transformers", "5.24", "5.24")
        refuse(self, global_batch, self._stride_options.get("sync"))
        self._global_batch, self._position = global_batch, dict[str, Any]()
        self._loss_count = None if weight_fn is None else LossCount("weight_fn", weight_fn)
        self.callback_handler.add_callback(_Watch(self))

    # ---- the run -------------------------------------------------------------------------------

    @property
    def stride(self) -> Stride:
        """The `Stride` of the latest run; the first call is collective."""
        if self._stride is None:
            options = {"seed": self._seed, **self._stride_options}
            self._stride = Stride(self._samples_per_update(), **options)
        return self._stride

    @property
    def mean_over(self) -> str | None:
        """What the loss is a mean over, such as ``samples``; ``None`` before it is known."""
        return None if self._loss_count is None else self._loss_count.name

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, from a checkpoint of any number of ranks."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        if self._stride is not None:
            self._stride.close()
        self._stride = None
        self._position = _position_in(resume_from_checkpoint)
        if self.model_wrapped is self.model:
            # An evaluation before training marks the model as prepared. Accelerate would then leave
            # out DistributedDataParallel, and each rank would train a model of its own.
            vars(self.model).pop("_is_accelerate_prepared", None)
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def get_total_train_batch_size(self, args: Any) -> int:
        del args
        return self.stride.global_batch

    def _samples_per_update(self) -> int:
        args = self.args
        usual = args.per_device_train_batch_size * args.gradient_accumulation_steps
        kept = self._position.get("global_batch")
        return self._global_batch or kept or usual * args.world_size

    @property
    def _seed(self) -> int:
        args = self.args
        return int(args.seed if args.data_seed is None else args.data_seed)

    # ---- data ----------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the micro-steps of this rank, from what the Trainer's own loader has."""
        asked = carried(super().get_train_dataloader(), pins=_pins())  # type: ignore[misc]
        count, stride = self._counted(asked), self.stride
        parts = self.args.gradient_accumulation_steps
        loader = stride.loader(
            asked.dataset,
            shuffle=asked.shuffle,
            drop_last=asked.drop_last,
            weight_fn=count.count,
            cost_fn=asked.costs,
            seeded=_augments(asked.dataset),
            **self._micro_batches(asked),
            **asked.options,
        )
        if self._position:
            stride.load_state_dict(self._position)
        skip = stride.state_dict()["position"] // stride.global_batch * parts
        return UpdateLoader(UpdateStream(stride, loader, parts, skip))

    def _micro_batches(self, asked: Carried) -> dict[str, Any]:
        args = self.args
        if self._has_own_loss:
            return {"micro_batches": args.gradient_accumulation_steps}
        if asked.costs is None:
            return {"max_micro_batch": args.per_device_train_batch_size}
        mean = sum(asked.costs) / len(asked.costs)  # type: ignore[arg-type]
        return {"max_micro_batch": max(1, round(mean * args.per_device_train_batch_size))}

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the micro-steps of an update; training stops if there is no further one."""
        found = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        if not found[0]:  # EVENSTRIDE_MAX_STEPS
            self.control.should_training_stop = True
        return found

    # ---- the loss ------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Train the micro-batches of a micro-step; return this rank's part of the loss.

        The mean of all ranks' parts, summed over an update, is the loss of the global batch.
        """
        del num_items_in_batch
        stride, total = self.stride, torch.zeros((), device=self.args.device)
        # Weights replace the division by the number of micro-steps.
        self.current_gradient_accumulation_steps = 1
        for batch in inputs.take():
            self._note(inputs, batch)
            with stride.accumulate(model), self._weighted(stride):
                # At least 1: a batch without items has a loss of 0 / 1, and no weight.
                items = self._items(batch)
                items = None if items is None else items.clamp(min=1)
                total = total + super().training_step(model, batch, items)  # type: ignore[misc]
        return total

    @contextlib.contextmanager
    def _weighted(self, stride: Stride) -> Iterator[None]:
        """Scale the loss of the outermost ``compute_loss``, that of any subclass."""
        compute, gather = self.compute_loss, self.accelerator.gather_for_metrics

        def scaled(*args: Any, **kwargs: Any) -> Any:
            found = compute(*args, **kwargs)
            if isinstance(found, tuple):
                return stride.scale(found[0]), *found[1:]
            return stride.scale(found)

        def waited(found: Any, *args: Any, **kwargs: Any) -> Any:
            if not stride.samples and isinstance(found, Tensor):  # sums without the placeholder
                found = torch.zeros_like(found)
            with stride.waiting():
                return gather(found, *args, **kwargs)

        with (
            self._own_counts(),
            _replaced(self, "compute_loss", scaled),
            _replaced(self.accelerator, "gather_for_metrics", waited),
        ):
            yield

    @contextlib.contextmanager
    def _own_counts(self) -> Iterator[None]:
        """Let the Trainer count this rank's items alone: evenstride sums over the ranks."""
        args = self.args
        flag, args.average_tokens_across_devices = args.average_tokens_across_devices, False
        try:
            yield
        finally:
            args.average_tokens_across_devices = flag

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        if batch_samples and isinstance(batch_samples[0], MicroStep):
            return None  # each micro-batch has its own
        return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]

    def _items(self, inputs: Any) -> Any:
        """Return what the Trainer counts in a batch, as a tensor; ``None`` if it counts nothing."""
        with self._own_counts():
            items = self._get_num_items_in_batch([inputs], torch.device("cpu"))
        return None if items is None else torch.as_tensor(items)

    @property
    def _has_own_loss(self) -> bool:
        """Whether a class other than transformers' computes the loss, maybe with collectives."""
        return overrides(self, "compute_loss")

    def _counted(self, asked: Carried) -> LossCount:
        """Return what the loss is a mean over, the same on every rank."""
        if self._loss_count is None:
            collate = asked.options["collate_fn"]
            assert collate is not None, "a Trainer always has a collator"
            # With FSDP2, a whole model may not fit on one device.
            sharded = self.accelerator.distributed_type.value == "FSDP"
            with self._own_counts():
                find = assume_count if sharded else find_count
                self._loss_count = find(self._tried(), asked.dataset, collate)
        return self._loss_count

    def _tried(self) -> TriedLoss:
        def loss(inputs: dict[str, Any], items: Any) -> Tensor:
            self.current_gradient_accumulation_steps = 1
            found: Any = self.compute_loss(self.model, inputs, num_items_in_batch=items)
            loss: Tensor = found[0] if isinstance(found, tuple) else found
            return loss

        args = self.args
        half = args.bf16 or args.fp16 or next(self.model.parameters()).dtype.itemsize < 4
        return TriedLoss(self, loss, self._items, self._loss_shifts_labels, half)

    # ---- what a Trainer reports ----------------------------------------------------------------

    def _note(self, part: MicroStep, batch: Any) -> None:
        """Count the tokens and operations of a micro-batch, unless it is a placeholder."""
        if self.stride.samples:
            part.note(float(self.floating_point_ops(batch)), self._input_tokens(batch))

    def floating_point_ops(self, inputs: Any) -> Any:
        if isinstance(inputs, MicroStep):
            return inputs.flos
        return super().floating_point_ops(inputs)  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if not inputs.last or self.args.include_num_input_tokens_seen == "no":
            return
        tokens = torch.tensor(inputs.tokens, device=self.args.device, dtype=torch.int64)
        with self.stride.waiting():
            self.state.num_input_tokens_seen += int(self.accelerator.gather(tokens).sum())

    def _input_tokens(self, inputs: Any) -> int:
        counted = self.args.include_num_input_tokens_seen
        main = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        if counted == "no" or main is None:
            return 0
        if counted == "non_padding" and "attention_mask" in inputs:
            return int(inputs["attention_mask"].sum())
        padding = getattr(self.processing_class, "pad_token_id", None)
        if counted == "non_padding" and padding is not None:
            return int(main.ne(padding).sum())
        return int(main.numel())

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # Since the last log: each rank has only its part of the loss.
        self._tr_loss = self.accelerator.gather(self._tr_loss).mean()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    # ---- checkpoints ---------------------------------------------------------------------------

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # In the Trainer's own file, so that weights and position are written together.
        self.state.stateful_callbacks[_STATE] = self.stride.state_dict()
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]


class EvenTrainer(EvenTrainerMixin, Trainer):  # type: ignore[misc]
    """`transformers.Trainer` with unequal shares; see `EvenTrainerMixin`.

    Example:
        A script needs no change besides the name of the class::

            from evenstride.integrations.transformers import EvenTrainer

            trainer = EvenTrainer(model=model, args=args, train_dataset=train_set)
            trainer.train()
    """


class _Watch(TrainerCallback):  # type: ignore[misc]
    """Watches the model once the Trainer has wrapped it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.stride.watch(self._trainer.model_wrapped)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a method of one object inside."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _position_in(checkpoint: Any) -> dict[str, Any]:
    """Return the position in the data that a checkpoint of the Trainer has."""
    if not isinstance(checkpoint, (str, os.PathLike)):
        return {}
    path = Path(checkpoint, TRAINER_STATE_NAME)
    if not path.is_file():
        return {}
    position = TrainerState.load_from_json(str(path)).stateful_callbacks.get(_STATE)
    if not isinstance(position, dict):
        raise ConfigError(
            f"the checkpoint {checkpoint} has no position in the data, because another Trainer "
            "wrote it: its samples had another order. Resume a checkpoint of EvenTrainer, or load "
            "the weights alone and start a new run"
        )
    return position


def _augments(dataset: Any) -> bool:
    """Return whether samples may be random, so that each needs a seed of its own."""
    kind = getattr(dataset, "format", None)
    # Without a transform, a data set of `datasets` is a table. It reads batches faster.
    return not isinstance(kind, dict) or kind.get("type") == "custom"


def _pins() -> bool:
    return bool(torch.accelerator.is_available())
