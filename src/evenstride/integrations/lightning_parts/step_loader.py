"""What a Trainer iterates over and logs, if a step has several micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor

MEANS = ("mean", "avg")
_JOINED = {"max": torch.maximum, "min": torch.minimum}


class StepLoader:
    """What a Trainer iterates over: the first batch of each step of this rank.

    The Trainer keeps the iterator of an epoch until the next one begins, so ``close`` ends it.
    """

    def __init__(self, loader: Any, dataset: Any, epoch_begins: Callable[[], bool]) -> None:
        self.dataset = dataset
        self.per_step = 1
        """Batches that the Trainer counts for a step."""
        self._loader, self._epoch_begins = loader, epoch_begins
        self._steps: Generator[Any] | None = None
        self._batches: Any = None

    def __len__(self) -> int:
        return len(self._loader) * self.per_step

    def __iter__(self) -> Iterator[Any]:
        self.close()
        self._steps = self._first_of_each()
        return self._steps

    def count(self, batches: int) -> None:
        """Let the Trainer count so many batches for a step."""
        self.per_step = batches

    def another(self) -> Any:
        """Return the next micro-batch of the current step."""
        return next(self._batches)

    def close(self) -> None:
        """End the current epoch's loop; what was drawn but not trained comes again."""
        if self._steps is not None:
            self._steps.close()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, but show Lightning that the loader can resume within an epoch."""
        return {}  # the strategy saves the position, also where Lightning asks no loader

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing; see `state_dict`."""

    def _first_of_each(self) -> Generator[Any]:
        if self._epoch_begins():
            self._loader.restart()  # the last epoch may have ended early (limit_train_batches)
        self._batches = iter(self._loader)
        try:
            yield from self._batches  # `another` advances it, too
        finally:
            self._batches.close()


class StepLogs:
    """Reduces what ``training_step`` logs over the ranks and over the micro-batches of a step.

    The ranks may have different numbers of micro-batches, but each has one that is the last. Only
    there they communicate. Means count each sample once, for any split.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._calls = 0

    def batch_begins(self, *, first: bool) -> None:
        """Note a batch, the first of a step or a later one."""
        self._calls = 0
        if first:
            self._kept.clear()

    def reduced(
        self,
        value: Tensor,
        op: str,
        samples: int,
        over_ranks: Callable[[Tensor, str], Tensor] | None,  # in the last micro-batch
    ) -> Tensor:
        """Return the value of this batch, or in the last batch that of the step so far."""
        mean = op in MEANS
        now = _weighted(value, samples) if mean else value.clone()
        if self._calls < len(self._kept):
            now = _JOINED.get(op, torch.add)(self._kept[self._calls], now)
        self._kept[self._calls : self._calls + 1] = [now]
        self._calls += 1
        if over_ranks is None:
            return value
        if not mean:
            return over_ranks(now, op)
        now = over_ranks(now, "sum")
        kind = value.dtype if value.is_floating_point() else torch.float64
        return (now[:-1] / now[-1]).reshape(value.shape).to(kind)


def _weighted(value: Tensor, samples: int) -> Tensor:
    """Return the elements times the samples of the batch, followed by that number."""
    # A placeholder's values may not be finite.
    elements = (
        value.detach().double().flatten() * samples
        if samples
        else value.new_zeros(value.numel(), dtype=torch.float64)
    )
    return torch.cat([elements, elements.new_tensor([samples])])


def op_name(reduce_op: object) -> str:
    """Return the name of a reduction, as Lightning or torch gives it."""
    return str(reduce_op).rpartition(".")[2].lower()
