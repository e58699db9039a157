"""Loaders for Lightning's Trainer. Does not import Lightning.

A Fabric script has its own loop and does not need this module. See docs/how-to/lightning.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

from torch.utils.data import DataLoader

from evenstride.errors import ConfigError
from evenstride.runtime.loading.evaluation import EvalLoader
from evenstride.runtime.stride import Stride

__all__ = ["TrainerLoader"]


class TrainerLoader:
    """A loader of a `Stride`, for ``LightningModule.train_dataloader``.

    A Trainer stops asking for batches after ``len(loader)`` of them. It begins the next epoch while
    it still holds the iterator of the previous one. This loader ends the previous loop instead. It
    also has the state that Lightning expects of a loader that can resume within an epoch.

    An evaluation loader needs it only with ``max_micro_batch`` or ``Stride(max_share=)``. Its
    ``len`` is then the most batches that a rank may have, so that a Trainer leaves none out.

    Args:
        stride: The `Stride` of this rank.
        loader: Result of ``stride.loader(dataset)``; for training without ``max_micro_batch``.

    Raises:
        ConfigError: In the first step whose share is split into micro-batches: a Trainer counts
            batches, but ranks have different numbers of micro-batches.

    Cost:
        One call per batch, without copies.

    Example:
        >>> import torch, evenstride
        >>> from evenstride.integrations.lightning import TrainerLoader
        >>> stride = evenstride.Stride(global_batch=4)
        >>> data = torch.utils.data.TensorDataset(torch.arange(8.0).reshape(8, 1))
        >>> loader = TrainerLoader(stride, stride.loader(data))
        >>> len(loader)
        2
        >>> stride.close()
    """

    def __init__(self, stride: Stride, loader: DataLoader[Any]) -> None:
        self._stride, self._loader = stride, loader
        # Weak, so that the loop ends when the Trainer releases it.
        self._latest: Callable[[], Generator[Any] | None] = lambda: None

    def __len__(self) -> int:
        if isinstance(self._loader, EvalLoader):
            return self._loader.batches_at_most
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if (latest := self._latest()) is not None:
            latest.close()
        batches = self._batches()
        self._latest = weakref.ref(batches)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data; see `Stride.state_dict`."""
        return self._stride.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; see `Stride.load_state_dict`."""
        self._stride.load_state_dict(state)

    def _batches(self) -> Generator[Any]:
        for batch in self._loader:
            if not self._stride.synced:
                raise ConfigError(
                    "this loader splits shares into micro-batches (max_micro_batch), but a Trainer "
                    "counts batches, and ranks have different numbers of micro-batches; leave "
                    "max_micro_batch out, or write the loop with Fabric, as in "
                    "examples/lightning_fabric.py"
                )
            yield batch
