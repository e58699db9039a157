"""Defines preemption notices and their sources, and selects the earliest notice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Notice:
    """An announced preemption of this machine or process.

    Args:
        source: ``aws``, ``gcp``, ``azure``, or the name of a signal.
        leaves_unix_s: the time of the preemption, as Unix time by this host's clock; ``None`` if
            it may come at any moment.
        whole_host: whether it affects every process of this machine, or only this one.
        withdrawable: whether the source may withdraw the notice. Then actions that cannot be
            undone should wait until the time has come.
        reason: a short phrase for messages.
    """

    source: str
    leaves_unix_s: float | None
    whole_host: bool
    withdrawable: bool
    reason: str


class NoticeSource(Protocol):
    """A source of notices; polled on its own thread.

    Attributes:
        name: unique among the sources of a watcher.
        on_network: whether polls use the network. Then only one process per machine polls it.
        pause_s: the pause between two polls, in seconds; ``None`` for the watcher's interval.
    """

    name: str
    on_network: bool
    pause_s: float | None

    def start(self) -> bool:
        """Prepare for polls, on the watcher's thread; return whether there is anything to poll."""

    def poll(self) -> Notice | None:
        """Return the current notice. May block until the state changes.

        Raises:
            NoAnswer: this poll could not determine whether there is a notice.
            Interrupted: `interrupt` was called.
        """

    def interrupt(self) -> None:
        """End the current poll and all later ones at once; may be called from any thread."""

    def close(self) -> None:
        """Undo `start`, after the last poll. May be called again."""


class NoAnswer(Exception):
    """A poll could not determine whether there is a notice.

    Args:
        kind: a constant name for the kind of failure; each kind is logged once.
        text: a description for messages.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Interrupted(Exception):
    """A poll was ended because the watcher closes."""


def earliest(notices: Iterable[Notice]) -> Notice | None:
    """Return the notice that takes effect first; those without a time come before all others.

    >>> spot = Notice("aws", 1000.0, True, False, "spot interruption")
    >>> term = Notice("SIGTERM", 910.0, False, False, "signal")
    >>> earliest([spot, term]).source
    'SIGTERM'
    >>> earliest([]) is None
    True
    """
    return min(
        notices,
        key=lambda n: float("-inf") if n.leaves_unix_s is None else n.leaves_unix_s,
        default=None,
    )


def skew_s(known_s: float, date_unix_s: float | None, now_unix_s: float) -> float:
    """Return by how many seconds a server's clock is ahead of this host's.

    Differences up to 1.5 s are ignored, because a ``Date`` header has whole seconds and a response
    takes time. A known skew is kept until a header contradicts it, so that times do not flicker.

    Args:
        known_s: the skew so far.
        date_unix_s: the time in the response's ``Date`` header; ``None`` without one.
        now_unix_s: the arrival of the response, by this host's clock.

    >>> skew_s(0.0, 100.0, 101.4)
    0.0
    >>> skew_s(0.0, 100.0, 160.0)
    -59.5
    """
    if date_unix_s is None:
        return known_s
    ahead_s = date_unix_s + 0.5 - now_unix_s
    if abs(ahead_s - known_s) <= 1.5:
        return known_s
    return ahead_s if abs(ahead_s) > 1.5 else 0.0
