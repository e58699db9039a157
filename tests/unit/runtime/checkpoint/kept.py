"""A store in memory, a store that breaks, and a small run that saves to either."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstride
from evenstride.runtime.checkpoint import Checkpointer, Restored
from evenstride.runtime.checkpoint.format.storage import Bytes

ROWS, BATCH = 40, 4


class MemoryStorage:
    """Files in a dictionary; shared by the runs of a test."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def __str__(self) -> str:
        return "the store"

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Write a file, chunk by chunk."""
        self.files[name] = b""
        for chunk in chunks:
            self.files[name] += bytes(chunk)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return a part of a file."""
        if name not in self.files:
            raise FileNotFoundError(name)
        end = None if length is None else start + length
        return self.files[name][start:end]

    def list(self, folder: str = "") -> list[str]:
        """Return the names in a folder."""
        prefix = f"{folder}/" if folder else ""
        inside = (name.removeprefix(prefix) for name in self.files if name.startswith(prefix))
        return sorted({name.partition("/")[0] for name in inside})

    def delete(self, name: str) -> None:
        """Delete a file."""
        self.files.pop(name, None)

    def delete_folder(self, folder: str) -> None:
        """Do nothing: a folder exists as long as it has files."""

    def exists(self, name: str) -> bool:
        """Return whether the file exists."""
        return name in self.files

    def checkpoints(self) -> Sequence[str]:
        """Return the names of the complete checkpoints."""
        return [name for name in self.list() if f"{name}/manifest.json" in self.files]


class Dead(BaseException):
    """The process has been killed, so no error handler runs."""


class MortalStorage(MemoryStorage):
    """A store of a process that is killed at its n-th write, before or during it.

    Args:
        files: of the store, which outlives the process.
        after: writes that still work; ``None`` for all.
        half: whether the write at which it dies leaves half of its bytes.
    """

    def __init__(self, files: dict[str, bytes], after: int | None, *, half: bool = False) -> None:
        super().__init__()
        self.files, self.left, self.half, self.writes = files, after, half, 0

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Write a file, or die."""
        self.writes += 1
        if self.left == 0:
            whole = b"".join(map(bytes, chunks))
            if self.half:
                self.files[name] = whole[: len(whole) // 2]
            self.left = -1
        if self.left == -1:
            raise Dead
        if self.left is not None:
            self.left -= 1
        super().write(name, chunks)

    def delete(self, name: str) -> None:
        """Delete a file, unless dead."""
        if self.left == -1:
            raise OSError("dead")
        super().delete(name)


class HeldStorage(MemoryStorage):
    """A store whose writes wait until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Write a file after its release."""
        self.begun.set()
        assert self.go_on.wait(60)
        super().write(name, chunks)


class FullStorage(MemoryStorage):
    """A store that raises its error, if it is set, for every write."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.tries = 0

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Write a file, or fail."""
        self.tries += 1
        if self.error is not None:
            raise self.error
        super().write(name, chunks)


def hours_later(patch: pytest.MonkeyPatch) -> None:
    """Advance the clock of checkpointers by two hours."""
    now_s = time.monotonic
    later = SimpleNamespace(monotonic=lambda: now_s() + 7200.0)
    patch.setattr("evenstride.runtime.checkpoint.checkpointer.time", later)


def abandon(checkpoint: Checkpointer) -> None:
    """End a checkpointer like an exception inside its ``with`` block."""
    checkpoint.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


class Solo:
    """A run of one process over forty rows, four at a time: ten steps make an epoch."""

    def __init__(self, folder: Any, **settings: Any) -> None:
        rows, batch = settings.pop("rows", ROWS), settings.pop("batch", BATCH)
        net, seed = settings.pop("net", None), settings.pop("seed", 0)
        self.stride = evenstride.Stride(global_batch=batch, seed=seed)
        shift = settings.pop("shift", 0.0)
        self.data = TensorDataset(torch.arange(rows, dtype=torch.float64).reshape(-1, 1) + shift)
        self.loader = self.stride.loader(self.data)
        torch.manual_seed(0)
        self.model = self.stride.watch((net or nn.Linear(1, 3)).double())
        make = settings.pop("optimizer", lambda p: torch.optim.Adam(p, lr=0.01))
        self.optimizer = make(self.model.parameters())
        self.open = True
        try:
            self.checkpoint = Checkpointer(
                folder, self.stride, model=self.model, optimizer=self.optimizer, **settings
            )
        except BaseException:
            self.stride.close()
            raise

    def train(self, steps: int) -> None:
        """Continue training, and call the checkpointer after each step."""
        while steps:
            for (x,) in self.loader:
                self.stride.scale(self.model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.checkpoint.step()
                steps -= 1
                if not steps:
                    break

    def settle(self) -> None:
        """Wait for the running save; its outcome is taken later."""
        for thread in threading.enumerate():
            if thread.name == "evenstride-checkpoint":
                thread.join()

    def weights(self) -> list[list[float]]:
        """Return all tensors of the model."""
        return [tensor.tolist() for tensor in self.model.state_dict().values()]

    def restore(self, allow: Any = ()) -> Restored | None:
        """Restore the newest checkpoint."""
        return self.checkpoint.restore(allow)

    def close(self) -> None:
        """End the run, even if the checkpointer raises."""
        if self.open:
            self.open = False
            abandon(self.checkpoint)
            self.stride.close()


class Runs:
    """Creates runs, and ends them with the test."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._made = patch, list[Solo]()

    def __call__(self, storage: Any, **settings: Any) -> Solo:
        """Return a run that saves to a storage, or to a folder."""
        if hasattr(storage, "write"):
            module = "evenstride.runtime.checkpoint.save.preparing.open_storage"
            self._patch.setattr(module, lambda _: storage)
        self._made.append(Solo("somewhere" if hasattr(storage, "write") else storage, **settings))
        return self._made[-1]

    def end(self) -> None:
        """End all runs."""
        for run in self._made:
            run.close()


class Count:
    """An object with a state of its own."""

    def __init__(self) -> None:
        self.state: dict[str, dict[Any, float]] = {"n": {}}

    def state_dict(self) -> Any:
        """Return the state."""
        return self.state

    def load_state_dict(self, state: Any) -> None:
        """Load the state."""
        self.state = state
