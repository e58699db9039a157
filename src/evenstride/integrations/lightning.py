"""Loaders as Lightning's Trainer wants them. Imports nothing of Lightning.

A script of Fabric has its own loop, and needs nothing of this. See docs/how-to/lightning.md.
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

    A Trainer stops asking when it has counted ``len(loader)`` batches, and begins the next epoch
    while it still holds the iterator of the last one. This ends the loop before in its place. It
    also has the state that Lightning looks for in a loader that can resume in mid-epoch.

    An evaluation loader needs it only with ``max_micro_batch`` or ``Stride(max_share=)``: then
    ``len`` is the most batches that a rank may have, so that a Trainer leaves none out.

    Args:
        stride: of this rank.
        loader: what ``stride.loader(dataset)`` returned; for training without ``max_micro_batch``.

    Raises:
        ConfigError: in the first step whose share is cut into micro-batches: a Trainer counts
            batches, and ranks have different numbers of them.

    Cost:
        One call per batch; nothing is copied.

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
        # Weak, so that the loop ends when the Trainer lets go of it.
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
                    "this loader cuts shares into micro-batches (max_micro_batch), and a Trainer "
                    "counts batches, of which ranks have different numbers; leave it out, or "
                    "write the loop with Fabric, as examples/lightning_fabric.py does"
                )
            yield batch
