"""A process group of our own: its ranks, its backend, and when none is created."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from evenstride.runtime.engines import process_groups
from evenstride.runtime.engines.process_groups import (
    let_threads_finish,
    let_threads_finish_at_exit,
    own_group,
)

GROUP = cast(Any, object())
CHANNEL = cast(Any, SimpleNamespace(timeout=3))


def test_a_single_process_has_no_group() -> None:
    assert own_group(GROUP, None) is None
    assert own_group(None, CHANNEL) is None


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_it_is_made_among_the_teams_ranks_alone_with_the_teams_patience(
    monkeypatch: pytest.MonkeyPatch, backend: str | None
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dist, "get_process_group_ranks", {GROUP: [4, 6]}.__getitem__)
    monkeypatch.setattr(
        dist,
        "new_group",
        lambda ranks, timeout, backend, *, use_local_synchronization: asked.append(
            (ranks, timeout, backend, use_local_synchronization)
        ),
    )

    own_group(GROUP, CHANNEL, backend)

    assert asked == [([4, 6], 3, backend, True)]


@pytest.mark.parametrize(("ranks", "split"), [([4, 6], False), ([0, 1, 2, 3, 4, 5, 6, 7], True)])
@pytest.mark.parametrize("fails", [False, True])
def test_only_a_group_of_the_whole_world_is_split_from_that_of_a_device(
    monkeypatch: pytest.MonkeyPatch, ranks: list[int], split: bool, fails: bool
) -> None:
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 3), size=lambda: 8)
    bound: list[torch.device | None] = []

    def new_group(*_: object, **__: object) -> None:
        bound.append(world.bound_device_id)
        if fails:
            raise RuntimeError("no such backend")

    torch_dist = SimpleNamespace(
        group=SimpleNamespace(WORLD=world),
        get_process_group_ranks={GROUP: ranks}.__getitem__,
        new_group=new_group,
    )
    monkeypatch.setattr(process_groups, "dist", torch_dist)

    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        own_group(GROUP, CHANNEL)

    assert bound == [torch.device("cuda", 3) if split else None]
    assert world.bound_device_id == torch.device("cuda", 3), "as the user has made it"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows which threads run")
def test_a_program_ends_after_threads_that_run() -> None:
    done = threading.Event()

    def work() -> None:
        for _ in range(10):  # without the interpreter lock, as the threads of a process group
            hashlib.sha256(bytes(10**7))
        done.set()

    threading.Thread(target=work).start()
    let_threads_finish(60.0)
    assert done.is_set()


def test_a_program_waits_for_its_threads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    let_threads_finish_at_exit.cache_clear()

    let_threads_finish_at_exit()
    let_threads_finish_at_exit()

    assert registered == [let_threads_finish]
