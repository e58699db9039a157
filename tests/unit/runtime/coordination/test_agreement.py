"""Collective calls: a rank that waits logs for which ranks, and decides nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from evenstride.errors import RanksDisagree, WorkerLost
from evenstride.runtime.coordination.agreement import Passed, Plain, agree
from evenstride.runtime.store.store_channel import Channel, agreed_token
from tests.messages import check_message, raises_message
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


def test_a_leader_that_waits_logs_the_missing_ranks_once() -> None:
    of = hasty(0)
    shows(of, 2)()

    with heard(shows(of, 1)) as said:
        verdict = ask(of)

    assert verdict == {"sum": 3}
    assert len(said) == 1
    check_message(said[0], "rank 0", "loader()", "rank 1")


@pytest.mark.parametrize(
    ("there", "missing"), [([2], "rank 0"), ([], "rank 0, 2"), ([0, 2], "rank 0")]
)
def test_a_rank_that_waits_for_the_leader_logs_the_missing_ranks(
    there: list[int], missing: str
) -> None:
    of = hasty(1)
    shows(of, *there)()

    with heard(lambda: of.put("call 1/verdict", '{"ok": {"sum": 5}}')) as said:
        verdict = ask(of)

    assert verdict == {"sum": 5}
    assert len(said) == 1
    assert said[0].startswith(f"rank 1 waits in loader() for {missing};")


def test_among_many_ranks_only_the_leader_looks_for_missing_ones() -> None:
    of = hasty(1, 65)

    with heard(lambda: of.put("call 1/verdict", '{"ok": {}}')) as said:
        ask(of)

    check_message(said[0], "rank 1", "loader()")


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_logs_a_wait_if_none_is_missing(rank: int) -> None:
    of = hasty(rank, tell_after=timedelta(0))
    shows(of, 0, 1, 2)()
    of.put("call 1/verdict", '{"ok": {"sum": 3}}')

    with heard() as said:
        verdict = ask(of)

    assert (verdict, said) == ({"sum": 3}, [])


@pytest.mark.parametrize(("tell_after", "times"), [(SOON, 1), (timedelta(seconds=1), 0)])
def test_a_rank_that_never_arrives_is_lost(tell_after: timedelta, times: int) -> None:
    of = hasty(0, 2, timeout=timedelta(milliseconds=50), tell_after=tell_after)

    with heard() as said, raises_message(WorkerLost, "rank 1", "loader()"):
        ask(of)

    assert len(said) == times


def test_a_leader_that_makes_no_stride_is_waited_for_aloud() -> None:
    store: Store = HashStore()

    with heard(lambda: store.set("token", "name")) as said:
        name = agreed_token(store, "token", 1, SOON)

    assert name == "name"
    assert len(said) == 1
    check_message(said[0], "rank 1", "Stride()", "rank 0")


def test_a_leader_that_never_makes_a_stride_is_lost() -> None:
    store: Store = HashStore()
    store.set_timeout(timedelta(milliseconds=50))

    with heard() as said, raises_message(WorkerLost, "rank 0", "Stride()"):
        agreed_token(store, "token", 1, SOON)

    assert len(said) == 1


def passing(of: Channel, passed: Passed) -> Plain:
    """Agree on nothing, in a call that some ranks may have left out."""
    return agree(of, "call 1", dict, lambda _: {}, "mean()", passed)


def test_a_rank_that_is_past_a_call_without_having_made_it_is_named() -> None:
    of = hasty(0)
    shows(of, 2)()

    with raises_message(RanksDisagree, "rank 1", "step 3"):
        passing(of, lambda _: {1: "sync of step 3", 2: "sync of step 3"})

    follower = replace(of, rank=2)
    with raises_message(RanksDisagree, "rank 0", "mean()", "rank 1"):
        passing(follower, lambda _: {})


def test_other_ranks_wait_only_for_the_leader() -> None:
    of = hasty(2)

    with heard() as said, raises_message(RanksDisagree, "rank 0"):
        passing(of, lambda _: {0: "its program ended early", 1: "sync of step 3"})

    assert len(said) == 1


def test_a_wait_ends_when_the_run_cannot_go_on() -> None:
    def lost(_: list[int]) -> dict[int, str]:
        raise WorkerLost("rank 1 is gone: its process 7 on one ended")

    with raises_message(WorkerLost, "rank 1"):
        passing(hasty(2), lost)


def test_a_rank_that_comes_late_but_comes_is_waited_for() -> None:
    of = hasty(0)

    with heard(shows(of, 1, 2)) as said:
        assert passing(of, lambda _: {}) == {}

    assert len(said) == 1


def test_nothing_stays_of_a_call_but_its_verdict() -> None:
    of = channel(0, 1)

    for call in range(1, 9):
        agree(of, f"call {call}", dict, lambda _: {}, before=f"call {call - 1}")

    assert of.meeting.num_keys() == 1
