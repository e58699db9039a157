"""A call that one rank makes late: the others say so, and all get what they asked for."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import evenstride
from evenstride.testing import RankPool
from tests.inside import session
from tests.messages import check_message
from tests.multiproc.training import FEATURES, rows
from tests.unit.runtime.coordination.test_agreement import heard


def one_is_late(rank: int, late: int) -> tuple[int, list[str]]:
    """Make a loader, on one rank only after all others have said that they wait."""
    stride = evenstride.Stride(global_batch=8, policy="uniform")
    channel = session(stride).team.channel
    assert channel is not None
    channel.tell_after = timedelta(milliseconds=10)
    store = dist.distributed_c10d._get_default_store()
    with heard(lambda: store.set(f"heard by {rank}", "")) as said:
        if rank == late:
            store.wait([f"heard by {other}" for other in range(3) if other != late])
            channel.tell_after = timedelta(seconds=60)
        steps = len(stride.loader(rows(20)))
    stride.close()
    return steps, said


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_wait_in_a_call_name_it_and_the_missing_ranks(
    ranks: RankPool, late: int
) -> None:
    answers = ranks.run(one_is_late, 3, late)

    assert [steps for steps, _ in answers] == [3, 3, 3]
    for rank, (_, said) in enumerate(answers):
        assert len(said) == (rank != late)
        for text in said:
            asked, _, missing = text.partition(";")[0].partition(" for rank ")
            assert asked.startswith(f"rank {rank} waits in ")
            assert "loader()" in asked
            assert str(late) in missing.split(", ")  # and any other that has not come yet


def a_late_mean(rank: int) -> tuple[object, list[str]]:
    """Take a mean, on rank 1 only after rank 0 has said that it waits."""
    stride = evenstride.Stride(global_batch=8, policy="uniform")
    store = dist.distributed_c10d._get_default_store()
    channel = session(stride).team.channel
    assert channel is not None
    channel.tell_after = timedelta(milliseconds=10) if rank == 0 else timedelta(seconds=60)
    with heard(lambda: store.set("heard", "")) as said:
        if rank == 1:
            store.wait(["heard"])
        mean = stride.mean(float(rank), 1)
    stride.close()
    return mean, said


def test_a_rank_that_waits_in_a_mean_says_so(ranks: RankPool) -> None:
    (mean, said), late = ranks.run(a_late_mean, 2)

    assert (mean, late) == (0.5, (0.5, []))
    assert len(said) == 1
    check_message(said[0], "rank 0", "mean()", "rank 1")


def trained(rank: int, watched: bool) -> list[str]:
    """Train two steps, with or without having given the model to watch(); return what was said."""
    del rank
    with heard() as said:
        stride = evenstride.Stride(global_batch=8, policy="uniform")
        net = torch.nn.Linear(FEATURES, 1).double()
        model = DistributedDataParallel(net)
        if watched:
            stride.watch(model)
        for _, x, y in stride.loader(rows(16)):
            loss = (model(x) - y).square().mean()
            stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            net.zero_grad()
        stride.close()
    return said


@pytest.mark.parametrize("watched", [True, False])
def test_an_unwatched_model_causes_one_warning(ranks: RankPool, watched: bool) -> None:
    said = ranks.run(trained, 2, watched)

    assert [len(reported) for reported in said] == ([0, 0] if watched else [1, 0])
    if not watched:
        check_message(said[0][0], "stride.watch")
