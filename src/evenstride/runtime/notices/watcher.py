"""Watches all sources of notices, each on its own thread, and reports changes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial

from evenstride.errors import ConfigError
from evenstride.runtime.notices.notice import (
    Interrupted,
    NoAnswer,
    Notice,
    NoticeSource,
    earliest,
)

logger = logging.getLogger("evenstride")

# Notices may come only 30 s ahead, so even a failing source is polled this often.
_LONGEST_PAUSE_S = 10.0
# Interrupted polls end at once, except during the look-up of a configured host name.
_JOIN_S = 2.0


class NoticeWatcher:
    """Watches sources of notices until it is closed.

    Args:
        sources: the sources; the watcher starts and closes them. To watch signals, create the
            watcher in the main thread.
        changed: called with the earliest notice whenever it or its time changes, and with
            ``None`` when the last notice is withdrawn. It is called on the watcher's threads, one
            call at a time, and should return quickly.
        interval_s: the interval, in seconds, for sources without a pause of their own.
        polls_clouds: whether this process polls metadata services. One process per machine is
            enough, such as local rank 0; the others only watch signals.
        wait: waits for an event for some seconds and returns whether it was set, like
            ``threading.Event.wait``.

    Raises:
        ConfigError: ``interval_s`` is not above 0.

    Cost:
        One thread per source, which blocks in the kernel, and a request of some hundred bytes per
        interval. The pause doubles with each failure of a source, up to 10 s.
    """

    def __init__(
        self,
        sources: Iterable[NoticeSource],
        changed: Callable[[Notice | None], None],
        interval_s: float = 5.0,
        *,
        polls_clouds: bool = True,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        if not interval_s > 0:
            raise ConfigError(
                f"invalid interval {interval_s:g} s for polling metadata services: expected more "
                "than 0 s; AWS recommends 5 s"
            )
        self._board = _Board(changed)
        self._wait, self._stop = wait, threading.Event()
        chosen = [source for source in sources if polls_clouds or not source.on_network]
        self._pid = os.getpid()
        self._started = [source for source in chosen if source.start()]
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(Post(source, partial(self._board.put, source.name), interval_s),),
                name=f"evenstride-notices-{source.name}",
                daemon=True,
            )
            for source in self._started
        ]
        for thread in self._threads:
            thread.start()

    @property
    def notice(self) -> Notice | None:
        """The notice that takes effect first, if any."""
        return self._board.first

    @property
    def notices(self) -> tuple[Notice, ...]:
        """All current notices, at most one per source."""
        return self._board.all

    def close(self) -> None:
        """Stop watching, and restore the signal handlers. May be called again.

        Call it in the thread that created the watcher, because handlers can only be restored there.
        Afterwards ``changed`` is not called. In a forked process it does nothing.
        """
        if os.getpid() != self._pid:  # the threads and pipes belong to the parent
            return
        self._board.silence()
        self._stop.set()
        started, self._started = self._started, []
        for source in started:
            source.interrupt()
        for source, thread in zip(started, self._threads, strict=False):
            if thread is threading.current_thread():
                continue
            thread.join(_JOIN_S)
            if thread.is_alive():  # it still uses the source; as a daemon it may stay
                logger.debug("the thread %s did not end in time", thread.name)
                continue
            source.close()

    def _run(self, post: Post) -> None:
        try:
            while not self._stop.is_set():
                if self._wait(self._stop, post.step()):
                    return
        except Interrupted:
            return


class Post:
    """One source and its failures: each kind of failure is logged once, and polls become rarer.

    Args:
        source: a started source.
        report: called with the result of each successful poll.
        interval_s: the pause between two polls, if the source has no pause of its own.
    """

    def __init__(
        self, source: NoticeSource, report: Callable[[Notice | None], None], interval_s: float
    ) -> None:
        self._source, self._report = source, report
        self._pause_s = interval_s if source.pause_s is None else source.pause_s
        self._failures, self._warned = 0, set[str]()

    def step(self) -> float:
        """Poll once, and return the pause before the next poll, in seconds.

        Raises:
            Interrupted: the source was interrupted.
        """
        try:
            notice = self._source.poll()
        except NoAnswer as error:
            return self._failed(error.kind, str(error))
        except Interrupted:
            raise
        except Exception as error:  # a thread that ended silently would miss the notice
            logger.debug("a source of notices failed", exc_info=True)
            return self._failed(type(error).__name__, f"it failed ({error!r:.200})")
        if self._failures:
            logger.info("evenstride: polling %s for notices works again", self._source.name)
        self._failures = 0
        self._report(notice)
        return self._pause_s

    def _failed(self, kind: str, text: str) -> float:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(
                "evenstride: polling %s for notices failed: %s; polling continues, and this "
                "warning is not repeated. In a container, allow access to the metadata service, or "
                "remove %s from notices",
                self._source.name,
                text,
                self._source.name,
            )
        self._failures += 1
        longest_s = max(_LONGEST_PAUSE_S, self._pause_s)
        return min(max(self._pause_s, 1.0) * 2.0 ** min(self._failures, 20), longest_s)


class _Board:
    """The current notice of each source, and the last one that was reported."""

    def __init__(self, changed: Callable[[Notice | None], None]) -> None:
        self._changed = changed
        # Held during the callback, so that calls come one at a time and in order; re-entrant, so
        # that the callback may close the watcher.
        self._lock = threading.RLock()
        self._notices: dict[str, Notice] = {}
        self._silent = False
        self.first: Notice | None = None

    @property
    def all(self) -> tuple[Notice, ...]:
        with self._lock:
            return tuple(self._notices.values())

    def put(self, name: str, notice: Notice | None) -> None:
        with self._lock:
            if notice is None:
                self._notices.pop(name, None)
            else:
                self._notices[name] = notice
            first = earliest(self._notices.values())
            if self._silent or first == self.first:
                return
            self.first = first
            try:
                self._changed(first)
            except Exception:  # an error of the callback must not end the watcher
                logger.exception("evenstride: the callback for a notice failed")

    def silence(self) -> None:
        # Without the lock: the current callback may be waiting for the closing thread.
        self._silent = True
