"""Calls that all ranks must make: who waits says so, and for whom, and decides nothing else."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from evenstride.errors import WorkerLost
from evenstride.runtime.agreement import Plain, agree
from evenstride.runtime.channel import Channel, _token, finish, told
from tests.unit.runtime.quiet import channel

SOON = timedelta(milliseconds=5)


@contextmanager
def heard(then: Callable[[], object] = lambda: None) -> Iterator[list[str]]:
    """Collect what is logged, and do something as soon as there is anything."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            then()

    handler, logger = Handler(), logging.getLogger("evenstride")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def hasty(rank: int, world_size: int = 3, **changes: Any) -> Channel:
    """Return a channel of which a rank that waits says so at once."""
    return replace(channel(rank, world_size), **{"tell_after": SOON, **changes})


def shows(of: Channel, *ranks: int) -> Callable[[], None]:
    """Return what lets other ranks come, each with its own number."""

    def come() -> None:
        for rank in ranks:
            of.put(f"call 1/rank/{rank}", json.dumps({"ok": {"mine": rank}}))

    return come


def ask(of: Channel) -> Plain:
    """Agree on the sum of what all ranks show."""

    def judge(shown: list[Plain]) -> Plain:
        return {"sum": sum(one["mine"] for one in shown)}

    return agree(of, "call 1", lambda: {"mine": of.rank}, judge, "loader()")


def test_a_leader_that_waits_says_for_whom_once_and_decides_the_same() -> None:
    of = hasty(0)
    shows(of, 2)()

    with heard(shows(of, 1)) as said:
        verdict = ask(of)

    assert verdict == {"sum": 3}
    assert len(said) == 1
    assert said[0].startswith("rank 0 waits in loader() for rank 1; every rank must make the same")


@pytest.mark.parametrize(
    ("there", "whom"), [([2], "rank 0"), ([], "rank 0, 2"), ([0, 2], "rank 0")]
)
def test_whoever_waits_for_the_leader_says_for_whom(there: list[int], whom: str) -> None:
    of = hasty(1)
    shows(of, *there)()

    with heard(lambda: of.put("call 1/verdict", '{"ok": {"sum": 5}}')) as said:
        verdict = ask(of)

    assert verdict == {"sum": 5}
    assert len(said) == 1
    assert said[0].startswith(f"rank 1 waits in loader() for {whom};")


def test_among_many_only_the_leader_asks_who_is_missing() -> None:
    of = hasty(1, 65)

    with heard(lambda: of.put("call 1/verdict", '{"ok": {}}')) as said:
        ask(of)

    assert said[0].startswith("rank 1 waits in loader() for the other ranks;")


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_says_anything_where_all_are_there(rank: int) -> None:
    of = hasty(rank, tell_after=timedelta(0))
    shows(of, 0, 1, 2)()
    of.put("call 1/verdict", '{"ok": {"sum": 3}}')

    with heard() as said:
        verdict = ask(of)

    assert (verdict, said) == ({"sum": 3}, [])


@pytest.mark.parametrize(("tell_after", "times"), [(SOON, 1), (timedelta(seconds=1), 0)])
def test_who_never_comes_is_lost_all_the_same(tell_after: timedelta, times: int) -> None:
    of = hasty(0, 2, timeout=timedelta(milliseconds=50), tell_after=tell_after)

    with heard() as said, pytest.raises(WorkerLost, match=r"rank 1 did not reach loader\(\)"):
        ask(of)

    assert len(said) == times


def test_a_leader_that_makes_no_stride_is_waited_for_aloud() -> None:
    store: Store = HashStore()

    with heard(lambda: store.set("token", "name")) as said:
        name = _token(store, "token", 1, SOON)

    assert name == "name"
    assert len(said) == 1
    assert said[0].startswith("rank 1 waits in Stride() for rank 0;")


def test_a_leader_that_never_makes_a_stride_is_lost() -> None:
    store: Store = HashStore()
    store.set_timeout(timedelta(milliseconds=50))

    with heard() as said, pytest.raises(WorkerLost, match=r"rank 0 did not reach Stride\(\)"):
        _token(store, "token", 1, SOON)

    assert len(said) == 1


def test_a_collective_that_takes_long_is_told_of_once() -> None:
    over = threading.Event()

    with heard(over.set) as said, told(3, "mean()", SOON):
        assert over.wait(60)

    assert len(said) == 1
    assert said[0].startswith("rank 3 waits in mean() for the other ranks;")


def test_a_collective_that_is_soon_over_is_not() -> None:
    with heard() as said, told(3, "mean()"):
        pass

    assert said == []
    assert "evenstride-told" not in {thread.name for thread in threading.enumerate()}


class Work:
    """A collective that takes longer than some waits for it, and may fail.

    Args:
        waits: for it that it takes.
        fails: whether it fails then.
        late: whether the wait before gives up when it is over already.
    """

    def __init__(self, waits: int, *, fails: bool = False, late: bool = False) -> None:
        self.waits, self.fails, self.late = waits, fails, late

    def wait(self, _: timedelta | None = None) -> bool:
        """Wait once."""
        if self.late and self.waits == 1:
            self.waits = 0
            raise RuntimeError("Operation timed out!")
        self.waits = max(self.waits - 1, 0)
        if self.waits or self.fails:
            raise RuntimeError("Operation timed out!" if self.waits else "Connection closed")
        return True

    def is_completed(self) -> bool:
        """Return whether it is over, well or not."""
        return not self.waits


def test_a_collective_that_is_over_when_the_wait_gives_up_is_no_failure() -> None:
    with heard() as said:
        finish(Work(1, late=True), 3, "mean()")  # type: ignore[arg-type]

    assert said == []


@pytest.mark.parametrize("waits", [1, 2])
def test_a_collective_on_the_cpu_is_waited_for_on_and_told_of_once(waits: int) -> None:
    work: Any = Work(waits)

    with heard() as said:
        finish(work, 3, "mean()")

    assert work.is_completed()
    assert len(said) == waits - 1
    assert all("rank 3 waits in mean() for the other ranks;" in text for text in said)


@pytest.mark.parametrize("waits", [1, 2])
def test_a_collective_that_fails_still_fails(waits: int) -> None:
    work: Any = Work(waits, fails=True)

    with heard() as said, pytest.raises(RuntimeError, match="Connection closed"):
        finish(work, 3, "mean()")

    assert len(said) == waits - 1
