"""Generations that workers form, here as threads with messages in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest

from evenstride.errors import EvenstrideError, InfeasibleShares, RanksDisagree
from evenstride.integrations.torchft.live_generation import (
    MOST_STEPS,
    Broken,
    LeaderRecord,
    LiveGeneration,
    Quorum,
    Shown,
)
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.timing.step_timer import StepRecord
from tests.messages import raises_message

BATCH = 12
SLOWER = {"host/a": 1.0, "host/b": 2.0, "host/c": 3.0}


@dataclass
class Worker:
    """One worker: what it knows, and what it would show."""

    shown: Shown
    lead: LeaderRecord
    generation: LiveGeneration | None = None

    def form(self, rank: int, size: int, gather: Callable[[str], list[str]]) -> LiveGeneration:
        quorum = Quorum(1, rank, size)
        mine = replace(self.shown, leads=self.lead.leads)
        self.generation = LiveGeneration(quorum, self.lead, gather, mine)
        self.shown = replace(self.shown, generation=self.generation.number)
        return self.generation


def worker(name: str, kept: int = 0, **own: Any) -> Worker:
    position = {"epoch": 0, "position": kept * BATCH, "step": kept}
    settings = {"policy": "adaptive", "seed": 0}
    own = {"slot": ord(name), "device": "cpu", **own}
    shown = Shown(f"host/{name}", f"first of {name}", kept, -1, False, position, settings, own)
    return Worker(shown, LeaderRecord("adaptive", BATCH))


def at(step: int, *workers: Worker) -> list[Worker]:
    """Return workers that have kept so many steps."""
    for one in workers:
        position = {"epoch": 0, "position": step * BATCH, "step": step}
        one.shown = replace(one.shown, kept=step, position=position)
    return list(workers)


def together(count: int, do: Callable[[int, Callable[[str], list[str]]], Any]) -> list[Any]:
    """Return what ``do(rank, gather)`` returns on each rank, all at once."""
    texts, meets = [""] * count, threading.Barrier(count, timeout=20)

    def on(rank: int) -> Any:
        def gather(text: str) -> list[str]:
            texts[rank] = text
            meets.wait()
            all_of_them = list(texts)
            meets.wait()
            return all_of_them

        return do(rank, gather)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(on, range(count)))


def form(*workers: Worker) -> list[LiveGeneration]:
    size = len(workers)
    return together(size, lambda rank, gather: workers[rank].form(rank, size, gather))


def trained(*workers: Worker, steps: range) -> None:
    """Let all have trained some steps, each at its own speed, and decide after each."""

    def on(rank: int, gather: Callable[[str], list[str]]) -> None:
        one = workers[rank]
        assert one.generation is not None
        one.generation._gather = gather
        for step in steps:
            one.generation.exchange(step)
            share = one.generation.gate.draw(step)[rank]
            busy_s = 0.01 + 0.01 * share * SLOWER[one.shown.name]
            record = StepRecord(step, share, busy_s, 0.0, 0.0, 0.0, 0.0, step > steps.start)
            one.generation.recorder.append(record)

    together(len(workers), on)


def test_all_apply_the_same_decisions_and_slow_workers_get_less() -> None:
    workers = [worker("a"), worker("b"), worker("c")]

    formed = form(*workers)
    trained(*workers, steps=range(8))

    assert {generation.number for generation in formed} == {0}
    assert len({generation.shares for generation in formed}) == 1
    shares = formed[0].shares
    assert sum(shares) == BATCH
    assert shares[0] > shares[1] >= shares[2] > 0


def test_the_leader_counts_the_time_of_its_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[Leader] = []
    # A function, so that it is called with the leader.
    monkeypatch.setattr(Leader, "finish_exchange", lambda leader: finished.append(leader))
    workers = [worker("a"), worker("b")]
    form(*workers)

    trained(*workers, steps=range(4))

    assert len(finished) == 3, "there is none before the first step"


def test_another_leader_goes_on_with_what_the_first_one_knew() -> None:
    a, b, c = (worker(name) for name in "abc")
    form(a, b, c)
    trained(a, b, c, steps=range(8))
    assert [one.lead.leads for one in (a, b, c)] == [True, False, False]

    formed = form(*at(8, b, c))

    assert [one.lead.leads for one in (b, c)] == [True, False]
    assert formed[0].number == 1
    assert formed[0].shares == formed[1].shares
    assert formed[0].shares[0] > formed[0].shares[1]  # b is known to be faster than c
    assert form(*at(0, worker("b"), worker("c")))[0].shares == (6, 6)  # who knows nothing


def test_a_worker_that_joins_has_no_samples_in_its_first_step_and_some_in_the_next() -> None:
    a, b = worker("a"), worker("b")
    form(a, b)
    trained(a, b, steps=range(4))
    c = worker("c")

    formed = form(*at(4, a, b), c)

    assert {generation.shares[2] for generation in formed} == {0}
    assert formed[2].position["step"] == 4
    assert [generation.late for generation in formed] == [{2}] * 3

    formed = form(*at(5, a, b, c))

    assert formed[0].shares[2] > 0
    assert not formed[0].late


def test_a_new_leader_gives_a_newcomer_nothing_either() -> None:
    a, b, c = worker("a", 4), worker("b", 4), worker("c")

    formed = form(c, a, b)

    assert [one.lead.leads for one in (c, a, b)] == [False, True, False]
    assert formed[0].shares == (0, 6, 6)


def test_a_worker_that_led_and_fell_behind_leads_no_longer() -> None:
    a, b = worker("a"), worker("b")
    form(a, b)
    at(3, b)
    at(2, a)

    formed = form(a, b)

    assert not a.lead.leads
    assert formed[0].shares == (0, 12)


def test_decisions_of_the_one_before_do_not_reach_the_next() -> None:
    a, b = worker("a"), worker("b")
    first = form(a, b)[0]
    trained(a, b, steps=range(5))
    second = form(*at(5, a, b))[0]

    assert second.gate is not first.gate
    first.gate.decide(5, (11, 1), opening=False)

    assert second.gate.draw(5) == second.shares != (11, 1)


def test_exchanges_are_never_far_apart() -> None:
    a, b = worker("a"), worker("b")
    generation = form(a, b)[0]
    trained(a, b, steps=range(60))

    assert generation._next <= 60 + MOST_STEPS
    assert generation._next > 59


def test_impossible_settings_are_refused_on_every_worker() -> None:
    a, b = worker("a", max_share=4), worker("b", max_share=4)

    def refused(rank: int, gather: Callable[[str], list[str]]) -> EvenstrideError:
        with pytest.raises(InfeasibleShares) as caught:
            (a, b)[rank].form(rank, 2, gather)
        return caught.value

    outcomes = together(2, refused)

    assert str(outcomes[0]) == str(outcomes[1])
    assert not a.lead.leads


def test_workers_that_disagree_hear_of_it_alike() -> None:
    a, b = worker("a"), worker("b")
    b.shown = replace(b.shown, settings={"policy": "uniform", "seed": 0})

    def refused(rank: int, gather: Callable[[str], list[str]]) -> None:
        with raises_message(RanksDisagree, "'adaptive'"):
            (a, b)[rank].form(rank, 2, gather)

    together(2, refused)


def test_a_newcomer_that_is_refused_does_not_end_the_others() -> None:
    a, b, c = worker("a"), worker("b"), worker("c")
    form(a, b)
    at(4, a, b)
    c.shown = replace(c.shown, settings={"policy": "adaptive", "seed": 1})

    def refused(rank: int, gather: Callable[[str], list[str]]) -> None:
        kind = RanksDisagree if rank == 2 else Broken
        with raises_message(kind):
            (a, b, c)[rank].form(rank, 3, gather)

    together(3, refused)
    assert form(a, b)[0].shares == (6, 6)  # the leader is as it was
