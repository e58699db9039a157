"""Watch all sources, each on a thread of its own, and tell of what changes."""

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

# Notices come as little as 30 s ahead: however long a source has failed, it is asked this often.
_LONGEST_PAUSE_S = 10.0
# Polls end at once when interrupted, but for the look-up of a name that somebody configured.
_JOIN_S = 2.0


class NoticeWatcher:
    """Watches sources of notices until it is closed.

    Args:
        sources: where notices come from; the watcher starts and closes them. To watch signals, make
            the watcher in the main thread.
        changed: called with the notice that takes effect first when there is one, when it is
            another one or its time changes, and with ``None`` when the last one has been withdrawn.
            On the watcher's threads, one call at a time; it should return soon.
        interval_s: how often a cloud that cannot hold back its answer is asked.
        polls_clouds: whether this process asks metadata services. One process of a machine is
            enough, so leave it to local rank 0; the others listen to signals only.
        wait: wait for an event for so many seconds and return whether it was set, as
            ``threading.Event.wait`` does.

    Raises:
        ConfigError: ``interval_s`` is not above 0.

    Cost:
        A thread per source that blocks in the kernel; a request of some hundred bytes per interval.
        A source that fails is asked half as often each time, at the least every 10 s.
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
                f"metadata services were to be asked every {interval_s:g} s; any interval above "
                "0 s is possible; choose 5, as AWS recommends"
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
        """The notice that takes effect first, if there is one."""
        return self._board.first

    @property
    def notices(self) -> tuple[Notice, ...]:
        """All notices in force, one per source at most."""
        return self._board.all

    def close(self) -> None:
        """Stop watching; restore signal handlers. May be called again.

        Call it in the thread that made the watcher: handlers can be restored only there. Afterwards
        ``changed`` is not called any more. In a process forked from this one it does nothing.
        """
        if os.getpid() != self._pid:  # the threads and the other ends of the pipes are the parent's
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
            if thread.is_alive():  # it still uses what would be closed; it is a daemon
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
    """One source, with its failures: one warning for each kind of failure, and rarer polls.

    Args:
        source: already started.
        tell: called with what the source says, each time it says something.
        interval_s: from one poll to the next, if the source has no pause of its own.
    """

    def __init__(
        self, source: NoticeSource, tell: Callable[[Notice | None], None], interval_s: float
    ) -> None:
        self._source, self._tell = source, tell
        self._pause_s = interval_s if source.pause_s is None else source.pause_s
        self._failures, self._warned = 0, set[str]()

    def step(self) -> float:
        """Poll once, and return how long to wait before the next time, in seconds.

        Raises:
            Interrupted: the source was.
        """
        try:
            notice = self._source.poll()
        except NoAnswer as error:
            return self._failed(error.kind, str(error))
        except Interrupted:
            raise
        except Exception as error:  # a thread that dies in silence would never see the notice
            logger.debug("a source of notices failed", exc_info=True)
            return self._failed(type(error).__name__, f"it failed ({error!r:.200})")
        if self._failures:
            logger.info("evenstride: notices from %s are seen again", self._source.name)
        self._failures = 0
        self._tell(notice)
        return self._pause_s

    def _failed(self, kind: str, text: str) -> float:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(
                "evenstride: no notice from %s can be seen at the moment: %s; it is asked again "
                "from time to time, and this is said once; in a container its metadata service may "
                "have to be opened, or leave %s out of notices",
                self._source.name,
                text,
                self._source.name,
            )
        self._failures += 1
        longest_s = max(_LONGEST_PAUSE_S, self._pause_s)
        return min(max(self._pause_s, 1.0) * 2.0 ** min(self._failures, 20), longest_s)


class _Board:
    """What each source says, and what has been told of it."""

    def __init__(self, changed: Callable[[Notice | None], None]) -> None:
        self._changed = changed
        # Held during the call, so that calls come one at a time and in the order of events;
        # re-entrant, so that it may close the watcher.
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
            except Exception:  # a fault of the caller's must not end the watch
                logger.exception("evenstride: what was to follow from a notice failed")

    def silence(self) -> None:
        # No lock: the call in progress may be waiting for the thread that closes.
        self._silent = True
