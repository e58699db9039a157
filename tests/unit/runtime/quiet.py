"""A clock, a store and a heartbeat without threads, for what is decided when a rank is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from evenstride.runtime.failures.heartbeat import Beat
from evenstride.runtime.store.store_channel import Channel
from evenstride.testing import FakeClock


class Clock(FakeClock):
    """Stands in for the module ``time``; sleeping is what moves it."""

    monotonic = FakeClock.__call__

    def __init__(self) -> None:
        super().__init__()
        self.slept: Callable[[], object] = lambda: None

    def thread_time(self) -> float:
        """Return the processor time of a thread, which takes none."""
        return 0.0

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.spend(seconds)
        self.slept()


class SetBeats:
    """The ranks' heartbeats, as set by a test."""

    def __init__(self, beats: dict[int, Beat]):
        self.latest = beats

    def beats(self) -> dict[int, Beat]:
        """Return every rank's latest heartbeat."""
        return dict(self.latest)

    def reads_all(self, occasion: str) -> bool:
        """Return that this rank reads all heartbeats on every occasion."""
        return bool(occasion)


def channel(rank: int = 0, world_size: int = 3) -> Channel:
    """Return a channel over a store of this process alone."""
    store: Store = HashStore()
    return Channel(rank, world_size, timedelta(seconds=4), store, store, store)


def message(of: Channel, key: str) -> Any:
    """Return what stands under a key, ``None`` if nothing."""
    return json.loads(of.read([key])[0]) if of.present([key])[0] else None
