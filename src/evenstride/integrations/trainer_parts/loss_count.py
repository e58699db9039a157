"""What the loss of a Trainer is a mean over: its model is asked, before the first step.

Trainers pass ``num_items_in_batch`` to a model that takes keyword arguments, but many models ignore
it. A loss that uses it is a sum divided by that number. With this rank's own number it is a mean,
which `Stride.scale` weights by the same number; the number cancels out. A loss that ignores it is a
mean over something else. Two halves of a batch show over what: the loss of the whole batch is the
mean of theirs, weighted by the right counts.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenstride.errors import ConfigError

logger = logging.getLogger("evenstride")

Inputs = Mapping[str, Any]
Count = Callable[[Inputs], float]

_IGNORED = -100
_ROWS = 8  # samples that are tried
_MOST_NUMBERS = 10_000  # in the counters of a trainer that are put back after the trial.
# Relative error of a loss, in 32 and in 16 bits.
_TOLERANCE, _TOLERANCE_OF_HALF = 1e-4, 2e-2


@dataclass(frozen=True, slots=True)
class LossCount:
    """What a batch counts for in the loss; ``count`` is ``None`` for its samples."""

    name: str
    count: Count | None = None


class TriedLoss(NamedTuple):
    """The parts of a trainer that a trial needs."""

    trainer: Any
    loss: Callable[[dict[str, Any], Any], Tensor]  # of inputs and ``num_items_in_batch``
    items: Callable[[Inputs], Any]  # ``num_items_in_batch`` of a batch, or ``None``
    shifted: bool  # whether the model predicts the next token of ``labels``
    half: bool  # whether it computes in 16 bits


def samples() -> LossCount:
    return LossCount("samples")


def items_of(tried: TriedLoss) -> LossCount:
    return LossCount("num_items_in_batch", lambda inputs: float(tried.items(inputs)))


def labels() -> LossCount:
    return LossCount("labels", lambda inputs: float(inputs["labels"].ne(_IGNORED).sum()))


def next_labels() -> LossCount:
    return LossCount(
        "labels of next tokens", lambda inputs: float(inputs["labels"][..., 1:].ne(_IGNORED).sum())
    )


def tokens() -> LossCount:
    return LossCount("tokens", lambda inputs: float(inputs["attention_mask"].sum()))


def find_count(tried: TriedLoss, dataset: Any, collate: Callable[[list[Any]], Any]) -> LossCount:
    """Return what a trainer's loss is a mean over; raise `ConfigError` if it is nothing known."""
    with _untouched(tried.trainer):
        inputs = _first_rows(dataset, collate)
        if not isinstance(inputs, Mapping):
            return samples()
        inputs = tried.trainer._prepare_inputs(inputs)
        usual = _candidates(tried, inputs)[0]
        if any(p.is_meta for p in tried.trainer.model.parameters()):
            return usual
        try:
            found = _Trial(tried, inputs).judge()
        except ConfigError:
            raise
        except Exception as error:
            logger.warning(
                "the loss could not be tried with %d samples (%s: %s), so evenstride assumes a "
                "mean over %s. If that is wrong, give the trainer a weight_fn",
                min(_ROWS, len(dataset)),
                type(error).__name__,
                error,
                usual.name,
            )
            return usual
    return found


def assume_count(tried: TriedLoss, dataset: Any, collate: Callable[[list[Any]], Any]) -> LossCount:
    """Return what a trainer's loss is most likely a mean over, without running its model."""
    with _untouched(tried.trainer):
        inputs = _first_rows(dataset, collate)
        if not isinstance(inputs, Mapping):
            return samples()
        if tried.items(inputs) is not None:
            return items_of(tried)
        found = _candidates(tried, inputs)[0]
    logger.warning(
        "with FSDP2 the loss is not tried, so evenstride assumes a mean over %s. If that is wrong, "
        "give the trainer a weight_fn",
        found.name,
    )
    return found


def _first_rows(dataset: Any, collate: Callable[[list[Any]], Any]) -> Any:
    return collate([dataset[index] for index in range(min(_ROWS, len(dataset)))])


def _candidates(tried: TriedLoss, inputs: Inputs) -> list[LossCount]:
    """Return what a loss may be a mean over; the most likely first."""
    found, of = [samples()], inputs.get("labels")
    if isinstance(of, Tensor) and of.dim() and not of.is_floating_point():
        by_label = [labels()] if of.dim() < 2 else [labels(), next_labels()]
        if tried.shifted:
            by_label.reverse()
        found = [*by_label, *found] if of.dim() > 1 else [*found, *by_label]
    if isinstance(inputs.get("attention_mask"), Tensor):
        found.append(tokens())
    return found


class _Trial:
    """The losses of a batch and of its two parts."""

    def __init__(self, tried: TriedLoss, inputs: Inputs) -> None:
        self._tried, self._inputs = tried, inputs
        self._tolerance = _TOLERANCE_OF_HALF if tried.half else _TOLERANCE
        self._items = tried.items(inputs)

    def judge(self) -> LossCount:
        candidates = _candidates(self._tried, self._inputs)
        whole = self._loss(self._inputs, self._items)
        if self._items is not None:
            twice = self._loss(self._inputs, self._items.clamp(min=1) * 2)
            # A loss that depends on it in part has an auxiliary term, a mean, in addition.
            if not self._close(whole, twice):
                return items_of(self._tried)
        parts = _halves(self._inputs, candidates)
        if parts is None or not math.isfinite(whole):
            return candidates[0]
        losses = [self._loss(part, self._tried.items(part)) for part in parts]
        for candidate in candidates:
            counts = [_counted(candidate, part) for part in parts]
            if sum(counts) and self._close(whole, float(np.average(losses, weights=counts))):
                return candidate
        raise _unknown(whole, losses, [candidate.name for candidate in candidates])

    def _close(self, one: float, other: float) -> bool:
        return math.isclose(one, other, rel_tol=self._tolerance, abs_tol=1e-9)

    def _loss(self, inputs: Inputs, items: Any) -> float:
        items = None if items is None else items.clamp(min=1)
        with torch.no_grad():
            return float(self._tried.loss(dict(inputs), items))


def _counted(candidate: LossCount, part: Inputs) -> float:
    return _rows(part) if candidate.count is None else candidate.count(part)


def _rows(inputs: Inputs) -> int:
    sizes = {len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim()}
    return sizes.pop() if len(sizes) == 1 else 0


def _halves(inputs: Inputs, candidates: list[LossCount]) -> tuple[Inputs, Inputs] | None:
    """Return two parts of a batch whose counts differ most; ``None`` if it cannot be split."""
    rows = _rows(inputs)
    if rows < 2 or any(not isinstance(value, Tensor) for value in inputs.values()):
        return None

    def split(at: int) -> tuple[Inputs, Inputs]:
        head = {name: value[:at] for name, value in inputs.items()}
        return head, {name: value[at:] for name, value in inputs.items()}

    def spread(at: int) -> float:
        of = [[_counted(candidate, part) for part in split(at)] for candidate in candidates]
        parts = [first / (first + second) for first, second in of if first + second]
        return max(parts) - min(parts)

    return split(max(range(1, rows), key=lambda at: (spread(at), -abs(2 * at - rows))))


def _unknown(whole: float, losses: list[float], names: list[str]) -> ConfigError:
    added = math.isclose(whole, sum(losses), rel_tol=_TOLERANCE)
    what = "a sum over the batch" if added else f"no mean over {' or '.join(names)}"
    return ConfigError(
        f"the loss of a batch is {whole:.6g}, and those of its two parts are {losses[0]:.6g} and "
        f"{losses[1]:.6g}: it is {what}, so the weight of a rank's batch is unknown. Use a mean, "
        "or give the trainer weight_fn=, a function of a batch that returns what its loss is a "
        "mean over, such as the sum of its class weights"
    )


@contextlib.contextmanager
def _untouched(trainer: Any) -> Iterator[None]:
    """Put back random numbers, the model's mode, and the trainer's own counters."""
    python, of_numpy = random.getstate(), np.random.get_state()
    counters = {n: copy.deepcopy(v) for n, v in vars(trainer).items() if _plain(v) < _MOST_NUMBERS}
    training = trainer.model.training
    trainer.model.eval()
    try:
        with torch.random.fork_rng(enabled=True):
            yield
    finally:
        trainer.model.train(training)
        vars(trainer).update(counters)
        random.setstate(python)
        np.random.set_state(of_numpy)


def _plain(value: Any) -> float:
    """Return how many plain values a container has; infinite if it has other objects."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return 1
    if isinstance(value, dict):
        return 1 + sum(_plain(one) for one in [*value.keys(), *value.values()])
    if isinstance(value, (list, tuple, set)):
        return 1 + sum(_plain(one) for one in value)
    return math.inf
