"""The training data of a Trainer: one item for each micro-step of an update.

A Trainer runs ``gradient_accumulation_steps`` micro-steps per update, the same number on every
rank, and fetches the batches of all of them before the first is trained. A rank's share has any
number of micro-batches, and each must be trained before the next is drawn. So the items are
`MicroStep` objects, which draw micro-batches when they are run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset


class Synced(Protocol):
    """The part of a `Stride` that ends an update."""

    @property
    def synced(self) -> bool:
        """Whether the latest micro-batch is the last of its update."""


class Update:
    """The micro-batches of one update on this rank, drawn one by one."""

    def __init__(self, stride: Synced, batches: Iterator[Any]) -> None:
        self._stride, self._batches = stride, batches
        self._held: Any = None
        self._last = self._over = False
        self.tokens = 0
        """Input tokens of the samples trained so far."""

    def note(self, tokens: int) -> None:
        self.tokens += tokens

    def begin(self) -> bool:
        """Draw the first micro-batch; ``False`` if the data has ended."""
        try:
            self._draw()
        except StopIteration:
            return False
        return True

    def take(self, *, rest: bool) -> Iterator[Any]:
        """Yield micro-batches to train: all that are left, or at most one that is not the last."""
        while not self._over:
            if self._held is None:
                self._draw()
            if self._last and not rest:
                return
            batch, self._held, self._over = self._held, None, self._last
            yield batch
            if not rest:
                return

    def _draw(self) -> None:
        self._held = next(self._batches)
        self._last = self._stride.synced


class MicroStep:
    """One of the micro-steps of an update; the last one synchronises."""

    def __init__(self, update: Update, *, last: bool) -> None:
        self._update, self.last = update, last
        self.flos = 0.0
        """Floating-point operations of the samples that it trained."""

    def take(self) -> Iterator[Any]:
        """Yield the micro-batches to train in this micro-step; there may be none."""
        return self._update.take(rest=self.last)

    @property
    def tokens(self) -> int:
        """Input tokens of the update so far."""
        return self._update.tokens

    def note(self, flos: float, tokens: int) -> None:
        """Count the operations and input tokens of a micro-batch."""
        self.flos += flos
        self._update.note(tokens)


class UpdateStream(IterableDataset[Any]):
    """Yields the micro-steps of the rest of an epoch; ``len`` counts samples.

    In the first pass ``skip`` items without data come first. A Trainer that resumes skips as many
    items as were trained before.
    """

    def __init__(self, stride: Synced, loader: DataLoader[Any], parts: int, skip: int) -> None:
        self._stride, self.loader, self._parts, self._skip = stride, loader, parts, skip

    def __len__(self) -> int:
        return len(self.loader.dataset)  # type: ignore[arg-type]

    @property
    def items(self) -> int:
        """Micro-steps of a whole epoch."""
        return len(self.loader) * self._parts

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        for _ in range(skip):
            yield None
        batches = iter(self.loader)
        while (update := Update(self._stride, batches)).begin():
            for part in range(self._parts):
                yield MicroStep(update, last=part == self._parts - 1)


class UpdateLoader(DataLoader[Any]):
    """A loader of `MicroStep` objects, for the loop of a Trainer.

    The data set is iterable, because Accelerate's ``skip_first_batches`` then creates a loader that
    counts items instead of one with the batches of another sampler.
    """

    def __init__(self, stream: UpdateStream) -> None:
        super().__init__(stream, batch_size=None, collate_fn=_same)
        self._stream = stream

    def __len__(self) -> int:
        return self._stream.items


def _same(item: Any) -> Any:
    return item
