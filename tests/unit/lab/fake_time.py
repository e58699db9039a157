"""A clock, an event and signals in virtual time, for the thread that keeps a duty cycle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any

import pytest

MODULE = "evenstride.lab.processes.cpu_limits"


@dataclass(slots=True)
class VirtualTime:
    """The world as the duty cycle sees it.

    Args:
        late_s: by how much each wait ends too late, again and again.
        waits: number of waits after which the cycle ends.
        at_wait: called before each wait with its number.
    """

    late_s: Sequence[float]
    waits: int
    at_wait: Callable[[int], None] = lambda _: None
    now_s: float = 0.0
    gone: set[int] = field(default_factory=set)
    signals: list[tuple[float, int, signal.Signals]] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    _begun: threading.Event = field(default_factory=threading.Event)
    _count: int = 0
    _ended: bool = False
    _late: Iterator[float] = field(init=False)

    def __post_init__(self) -> None:
        self._late = cycle(self.late_s)

    def begin(self) -> None:
        """Let the cycle go."""
        self._begun.set()

    def perf_counter(self) -> float:
        return self.now_s

    def killpg(self, pid: int, number: signal.Signals) -> None:
        if pid in self.gone:
            raise ProcessLookupError
        self.signals.append((self.now_s, pid, number))

    def wait(self, timeout_s: float) -> None:
        self._count += 1
        self.at_wait(self._count)
        self.now_s += timeout_s + (next(self._late, 0.0) if timeout_s > 0 else 0.0)
        self._ended = self._ended or self._count >= self.waits

    def is_set(self) -> bool:
        assert self._begun.wait(30.0), "the test never let the cycle go"
        return self._ended

    def set(self) -> None:
        self._ended = True
        self._begun.set()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in place of the real world."""
        monkeypatch.setattr(f"{MODULE}.time", self)
        monkeypatch.setattr(f"{MODULE}.os", self)
        monkeypatch.setattr(f"{MODULE}.threading", _Threading(self))

    def ran_s(self, pid: int) -> tuple[float, float]:
        """Return how long a process ran between its first signal and its last, and of how long."""
        mine = [(at_s, number) for at_s, to, number in self.signals if to == pid]
        ran_s = sum(
            after_s - at_s
            for (at_s, number), (after_s, _) in pairwise(mine)
            if number == signal.SIGCONT
        )
        return ran_s, mine[-1][0] - mine[0][0]

    def last(self, pid: int) -> signal.Signals:
        """Return the signal that a process got last."""
        return [number for _, to, number in self.signals if to == pid][-1]


@dataclass(frozen=True, slots=True)
class _Threading:
    world: VirtualTime

    def Event(self) -> VirtualTime:
        return self.world

    def Thread(self, **options: Any) -> threading.Thread:
        self.world.threads.append(threading.Thread(**options))
        return self.world.threads[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)
