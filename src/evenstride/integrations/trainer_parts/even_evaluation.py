"""Evaluation of a Trainer in which each rank has its own number of batches.

The loop of a Trainer gathers the results of every batch, so all ranks need equally many. Here each
rank runs that loop on its own, without gathering. The results of all ranks are put in the order of
the data set afterwards, and the metrics are computed from all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import EvalPrediction
from transformers.trainer_pt_utils import nested_concat
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

from evenstride.integrations.trainer_parts.carried_options import carried
from evenstride.integrations.trainer_parts.loss_count import LossCount

_PADDING = -100


class Numbered(Dataset[Any]):
    """A data set whose samples come with their index."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._dataset[index]


class NumberedCollate:
    """Collates numbered samples: their indices, and the batch as before."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, rows: list[tuple[int, Any]]) -> tuple[list[int], Any]:
        return [index for index, _ in rows], self._collate([sample for _, sample in rows])


class EvalFeed:
    """This rank's batches of an evaluation, and what is found out about them.

    ``counts`` and ``losses`` have an entry per batch, ``indices`` one per sample.
    """

    def __init__(self, dataset: Any, loader: DataLoader[Any], batch_size: int) -> None:
        self.dataset, self._loader, self.batch_size = dataset, loader, batch_size
        self.indices: list[list[int]] = []
        self.losses: list[float] = []
        self.counts: list[float] = []

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self.indices, self.losses, self.counts = [], [], []
        for indices, batch in self._loader:
            self.indices.append(indices)
            yield batch

    def add(self, loss: Any, count: float) -> None:
        """Note the loss of the current batch."""
        self.losses.append(float(loss))
        self.counts.append(count)

    def total(self, *, finite: bool) -> tuple[float, float]:
        """Return the sums of the weighted losses and of the weights; maybe of finite ones only."""
        pairs = [
            (loss * count, count)
            for loss, count in zip(self.losses, self.counts, strict=True)
            if count and (np.isfinite(loss) or not finite)
        ]
        return sum(loss for loss, _ in pairs), sum(count for _, count in pairs)

    def by_sample(self) -> Any:
        """Return the loss of its batch for each sample."""
        pairs = zip(self.losses, self.indices, strict=True)
        return np.array([loss for loss, of in pairs for _ in of]) if self.losses else None


class EvenEvaluation:
    """The part of `EvenTrainerMixin` that evaluates."""

    args: Any
    accelerator: Any
    state: Any
    control: Any
    callback_handler: Any
    model: nn.Module
    model_wrapped: nn.Module
    compute_loss: Any
    compute_metrics: Any
    gather_function: Any
    label_names: Any
    processing_class: Any
    _loss_shifts_labels: bool
    _tr_loss: Any
    _feed: EvalFeed | None = None

    @property
    def stride(self) -> Any:
        raise NotImplementedError

    def _counted(self, asked: Any) -> LossCount:
        raise NotImplementedError

    def _own_counts(self) -> contextlib.AbstractContextManager[None]:
        raise NotImplementedError

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's batches, or the Trainer's loader if every rank must have equally many.

        That is the case for a trainer with a ``compute_loss`` or ``prediction_step`` of its own,
        which may contain collectives, and with ``batch_eval_metrics``.
        """
        return self._feed_for(super().get_eval_dataloader(*args, **kwargs))  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._feed_for(super().get_test_dataloader(*args, **kwargs))  # type: ignore[misc]

    def _feed_for(self, loader: Any) -> Any:
        if self.args.world_size == 1 or not self._evaluates_alone(loader):
            return loader
        asked = carried(loader, pins=torch.accelerator.is_available(), training=False)
        collate = asked.options["collate_fn"]
        assert collate is not None, "a Trainer always has a collator"
        self._counted(asked)
        size = self.args.per_device_eval_batch_size
        options: dict[str, Any] = {**asked.options, "collate_fn": NumberedCollate(collate)}
        mine = self.stride.loader(
            Numbered(asked.dataset),
            train=False,
            max_micro_batch=size,
            global_batch=size * self.args.world_size,
            check_data=False,
            **options,
        )
        return EvalFeed(asked.dataset, mine, size)

    def _evaluates_alone(self, loader: Any) -> bool:
        args = self.args
        own = overrides(self, "compute_loss") or overrides(self, "prediction_step")
        batched = args.batch_eval_metrics or not args.eval_do_concat_batches
        plain = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        sharded = self.accelerator.distributed_type.value == "FSDP"
        return plain and not (own or batched or sharded)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's loop on this rank's batches, and compute the metrics over all ranks."""
        loop = super().evaluation_loop  # type: ignore[misc]
        if not isinstance(dataloader, EvalFeed):
            return loop(dataloader, *args, **kwargs)
        seen: list[Any] = []
        self._feed = dataloader
        try:
            with self._alone(seen):
                output = loop(dataloader, *args, **kwargs)
        finally:
            self._feed = None
        prefix = kwargs.get("metric_key_prefix", args[3] if len(args) > 3 else "eval")
        return self._merged(dataloader, output, seen, prefix)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, *others = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        feed = self._feed
        if feed is not None and loss is not None:
            count, rows = self._counted(None).count, len(feed.indices[-1])
            feed.add(loss, rows if count is None else float(count(inputs)))
        return loss, *others

    @contextlib.contextmanager
    def _alone(self, seen: list[Any]) -> Iterator[None]:
        """Let the loop keep its results on this rank, and note what the metrics would get."""
        metrics, accelerator = self.compute_metrics, self.accelerator

        def note(predictions: Any) -> dict[str, float]:
            seen.append(predictions)
            return {}

        def keep(results: Any, *_: Any, **__: Any) -> Any:
            return results

        self.compute_metrics = None if metrics is None else note
        self.gather_function = accelerator.pad_across_processes = keep
        try:
            with self._own_counts():
                yield
        finally:
            self.compute_metrics = metrics
            self.gather_function = accelerator.gather_for_metrics
            del accelerator.pad_across_processes

    def _merged(self, feed: EvalFeed, output: Any, seen: list[Any], prefix: str) -> Any:
        """Return the results of all ranks in the order of the data set, with their metrics."""
        order = [index for batch in feed.indices for index in batch]
        mine = {
            "order": order,
            "predictions": output.predictions,
            "labels": output.label_ids,
            "inputs": seen[0].inputs if seen else None,
            "losses": feed.by_sample(),
        }
        everyone = [of for of in gather_object([mine]) if of["order"]]
        found = {name: _in_order(everyone, name) for name in mine if name != "order"}
        metrics = {k: v for k, v in output.metrics.items() if k != f"{prefix}_loss"}
        if any(of["losses"] is not None for of in everyone):
            total, count = feed.total(finite=self.args.logging_nan_inf_filter)
            metrics[f"{prefix}_loss"] = self.stride.mean(total, count)
        metrics |= {_prefixed(k, prefix): v for k, v in self._computed(found).items()}
        return EvalLoopOutput(
            predictions=found["predictions"],
            label_ids=found["labels"],
            metrics=metrics,
            num_samples=output.num_samples,
        )

    def _computed(self, found: dict[str, Any]) -> dict[str, Any]:
        asked = self.args.include_for_metrics
        if self.compute_metrics is None or found["predictions"] is None or found["labels"] is None:
            return {}
        more = {name: found[name] for name in ("inputs", "losses")}
        more["inputs"] = more["inputs"] if "inputs" in asked else None
        more["losses"] = more["losses"] if "loss" in asked else None
        computed = self.compute_metrics(
            EvalPrediction(predictions=found["predictions"], label_ids=found["labels"], **more)
        )
        return dict(denumpify_detensorize(computed))


def overrides(trainer: object, method: str) -> bool:
    """Return whether a class other than transformers' and ours has its own method of this name."""
    known = ("transformers.", "evenstride.")
    classes = [kind for kind in type(trainer).__mro__ if method in vars(kind)]
    return any(not kind.__module__.startswith(known) for kind in classes)


def _prefixed(name: str, prefix: str) -> str:
    return name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"


def _in_order(everyone: list[dict[str, Any]], name: str) -> Any:
    """Return one result of all ranks, sorted by the samples' indices."""
    parts = [of[name] for of in everyone if of[name] is not None]
    if not parts:
        return None
    joined = parts[0]
    for part in parts[1:]:
        joined = nested_concat(joined, part, padding_index=_PADDING)
    order = np.argsort(np.concatenate([of["order"] for of in everyone]), kind="stable")
    return _picked(joined, order)


def _picked(values: Any, order: Any) -> Any:
    if isinstance(values, (list, tuple)):
        return type(values)(_picked(value, order) for value in values)
    if isinstance(values, dict):
        return {name: _picked(value, order) for name, value in values.items()}
    return values[order]
