"""What a notice is, and which of several counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Notice:
    """This machine or process will be taken away.

    Args:
        source: who said so: ``aws``, ``gcp``, ``azure``, or the name of a signal.
        leaves_unix_s: when it will be gone, in seconds since 1970 on this host's clock; ``None``
            if that may be at any moment.
        whole_host: every process of this machine goes; otherwise this process.
        withdrawable: the source is known to take such notices back, so what cannot be undone is
            better left until the time has come.
        reason: a short phrase for people.
    """

    source: str
    leaves_unix_s: float | None
    whole_host: bool
    withdrawable: bool
    reason: str


class NoticeSource(Protocol):
    """Where notices come from; polled on a thread of its own.

    Attributes:
        name: unique among the sources of a watcher.
        on_network: the source is asked over the network, which one process per machine does.
        pause_s: how long to wait from one poll to the next; ``None`` for the watcher's interval.
    """

    name: str
    on_network: bool
    pause_s: float | None

    def start(self) -> bool:
        """Open what polling needs, on the thread that makes the watcher; say if there is any."""

    def poll(self) -> Notice | None:
        """Return the notice there is now. May block until there is something to tell.

        Raises:
            NoAnswer: whether there is a notice is not known this time.
            Interrupted: `interrupt` was called.
        """

    def interrupt(self) -> None:
        """Make the poll in progress, and every later one, end at once. From any thread."""

    def close(self) -> None:
        """Undo `start`, after the last poll. May be called again."""


class NoAnswer(Exception):
    """A source could not say whether there is a notice.

    Args:
        kind: what went wrong, the same words each time; there is one warning per kind.
        text: what happened, for people.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Interrupted(Exception):
    """A poll was ended because the watcher closes."""


def earliest(notices: Iterable[Notice]) -> Notice | None:
    """Return the notice that takes effect first; at any moment comes before every time.

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
    """Return by how much a server's clock is ahead of this host's, in seconds.

    A ``Date`` header is cut to whole seconds, and an answer takes a while; what these explain
    (1.5 s) is no skew. A known skew is kept until the header contradicts it, so that times do not
    flicker.

    Args:
        known_s: the skew so far.
        date_unix_s: what the server's ``Date`` header said; ``None`` if it had none.
        now_unix_s: when the answer came, on this host's clock.

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
