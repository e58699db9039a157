"""Prepared loaders: batches of unequal size, in equal numbers on all processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from evenstride.errors import ConfigError
from evenstride.runtime.loading.loader_options import dataset_length


class Run(Protocol):
    """What the loaders use of a `Stride`."""

    @property
    def global_batch(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def synced(self) -> bool: ...
    @property
    def epoch(self) -> int: ...
    @property
    def step(self) -> int: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Mover:
    """Moves batches to a device; to none with ``None``."""

    device: torch.device | None
    non_blocking: bool = False

    def __call__(self, batch: Any) -> Any:
        if self.device is None:
            return batch
        return send_to_device(batch, self.device, non_blocking=self.non_blocking)


class _Batches(DataLoaderStateMixin, DataLoader[Any]):  # type: ignore[misc]
    """A loader that looks like the user's, whose batches come from a Stride's loader."""

    # Not DataLoader.__init__: the options are those of the user's loader, see __getattr__.
    def __init__(self, given: DataLoader[Any], inner: Any, move: Mover) -> None:
        self._given, self._inner, self._move = given, inner, move
        self.gradient_state = GradientState()
        self._drop_last = given.drop_last

    empty = False
    """Whether the current batch is a placeholder, whose samples belong to other processes."""

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        return self._inner.batch_sampler

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        return self._inner.sampler

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._given, name)


class TrainBatches(_Batches):
    """The training loader: this process's part of each global batch, in equally many batches."""

    def __init__(
        self,
        given: DataLoader[Any],
        stride: Run,
        inner: Any,  # its `TrainLoader`
        move: Mover,
        steps: int,  # batches per update
    ) -> None:
        super().__init__(given, inner, move)
        self.stride, self._steps = stride, steps
        self.resumed = self._left = False
        # Weak, so that the loop ends when the script releases its iterator.
        self._latest: Callable[[], Generator[Any] | None] = lambda: None

    def __len__(self) -> int:
        samples, batch = dataset_length(self.dataset), self.stride.global_batch
        if self._drop_last:
            return samples // batch * self._steps
        return -(-samples * self._steps // batch)

    @property
    def total_batch_size(self) -> int:
        """Samples of one batch over all processes."""
        return self.stride.global_batch // self._steps

    @property
    def empty(self) -> bool:  # type: ignore[override]
        return self.stride.samples == 0

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the Stride counts the epochs."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if (latest := self._latest()) is not None:
            latest.close()
        batches = self._passed()
        self._latest = weakref.ref(batches)
        return batches

    def _passed(self) -> Generator[Any]:
        if self._left:  # as with any DataLoader, a new pass begins a new epoch
            self._inner.restart()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.stride.epoch)
        self.begin()
        self.resumed, ended, before = False, False, self.stride.step
        try:
            for batch in self._inner:
                self.end_of_dataloader = self._inner.at_end
                self.gradient_state.sync_gradients = self.stride.synced
                yield self._move(batch)
            ended = True
        finally:
            # A pass that trained nothing does not count.
            self._left = not ended and self.stride.step > before
            self.gradient_state.sync_gradients = True
            self.end()

    def go_to(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        self.stride.load_state_dict(state)
        self._left, self.resumed = False, True

    def skip(self, batches: int) -> None:
        """Begin the next pass after some batches of the epoch; nothing after `go_to`."""
        if self.resumed:
            return
        if not 0 <= batches < len(self):
            raise ConfigError(
                f"skip_first_batches() got {batches} batches, but the loader has {len(self)} per "
                "epoch; skip fewer"
            )
        state = self.stride.state_dict()
        state["position"] = batches // self._steps * self.stride.global_batch
        self.stride.load_state_dict(state)
        self._left = False


class EvalBatches(_Batches):
    """An evaluation loader: each sample once over all processes, in equally many batches.

    A process that has no samples in a step gets a placeholder, the first sample of the data set, so
    that it takes part in the collectives of the loop.
    """

    def __init__(
        self,
        given: DataLoader[Any],
        inner: Any,  # an `EvalLoader`
        move: Mover,
        total_batch_size: int,
    ) -> None:
        super().__init__(given, inner, move)
        self.total_batch_size = total_batch_size

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = self._inner.numbered()
        self.begin()
        try:
            step, batch = next(batches, (-1, None))
            for now in range(len(self)):
                self.end_of_dataloader = now + 1 == len(self)
                self.empty = now != step
                yield self._move(self._placeholder() if self.empty else batch)
                if now == step:
                    step, batch = next(batches, (-1, None))
        finally:
            batches.close()
            self.empty = False
            self.end()

    def _placeholder(self) -> Any:
        return self.collate_fn([self.dataset[0]])
