"""`Stride.mean` that some rank calls and another does not: named, and nothing trained wrongly."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import evenstride
from evenstride.errors import RanksDisagree
from evenstride.testing import RankPool
from tests.messages import check_message
from tests.multiproc.training import FEATURES, rows

# Two gradients of float64, as many as the mean of one number sends: total and count.
_STEPS, _SKIPPED = 6, 2


@dataclass
class Seen:
    """What one rank saw.

    Args:
        weights: at the end.
        said: by the mean, where it was refused.
    """

    weights: list[float] = field(default_factory=list)
    said: str = ""


def trained(rank: int, callers: tuple[int, ...]) -> Seen:
    """Train; in one step only some ranks take a mean."""
    stride, seen = evenstride.Stride(global_batch=12, policy="uniform"), Seen()
    net = torch.nn.Linear(FEATURES, 1, bias=False).double()
    torch.nn.init.ones_(net.weight)
    model = stride.watch(DistributedDataParallel(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _, x, y in stride.loader(rows(12 * _STEPS)):
        loss = (model(x) - y).square().mean()
        stride.scale(loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if stride.step == _SKIPPED and rank in callers:
            try:
                stride.mean(torch.full((FEATURES - 1,), 3.0), stride.samples)
            except RanksDisagree as error:
                seen.said = str(error)
    stride.close()
    seen.weights = net.weight.detach().flatten().tolist()
    return seen


@pytest.mark.parametrize(
    ("callers", "missing"), [((0,), [1, 2]), ((1,), [0]), ((0, 2), [1]), ((1, 2), [0])]
)
def test_a_mean_that_some_ranks_skip_names_them_and_spoils_no_gradient(
    ranks: RankPool, callers: tuple[int, ...], missing: list[int]
) -> None:
    everyone = ranks.run(trained, 3, callers)

    expected = ranks.run(trained, 3, ())[0].weights
    for rank, seen in enumerate(everyone):
        assert seen.weights == expected
        assert bool(seen.said) == (rank in callers)
        if rank in callers:
            assert "waits in mean(), but rank " in seen.said
            assert any(f"rank {other} (" in seen.said for other in missing)
            assert not any(f"rank {other} (" in seen.said for other in callers)


def refused(rank: int, how: str) -> str:
    """Take a mean that differs between the ranks, and return why it is refused."""
    stride = evenstride.Stride(global_batch=8, policy="uniform")
    net = torch.nn.Linear(FEATURES, 1).double()
    model = stride.watch(DistributedDataParallel(net))

    def mean() -> str:
        total = torch.ones(2 + rank if how == "shape" else 2)
        name = f"loss of {rank}" if how == "name" else None
        try:
            stride.mean(total if name is None else 1.0, 1, name)
        except RanksDisagree as error:
            return str(error)
        return "allowed"

    said = ""
    for _, x, y in stride.loader(rows(16)):
        stride.scale((model(x) - y).square().mean()).backward()  # type: ignore[no-untyped-call]
        net.zero_grad()
        if how == "place" and rank == 0 and stride.step == 2:
            said = mean()
    said = said or mean()
    dist.barrier()
    stride.close()
    return said


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (
            "place",
            ("mean()", "2 steps", "rank 0"),
        ),
        ("name", ("mean()",)),
        ("shape", ("mean()", "rank 0", "rank 1")),
    ],
)
def test_means_that_do_not_match_are_refused_alike(
    ranks: RankPool, how: str, why: tuple[str, ...]
) -> None:
    said = ranks.run(refused, 2, how)

    assert said[0] == said[1]
    check_message(said[0], *why)


def ended(rank: int) -> str:
    """Take a mean that the other rank, whose `Stride` has ended, never takes."""
    stride = evenstride.Stride(global_batch=8, policy="uniform")
    if rank == 0:
        try:
            stride.mean(1.0, 1)
        except RanksDisagree as error:
            return str(error)
    stride.close()
    return ""


def test_a_rank_that_has_ended_is_named_at_once(ranks: RankPool) -> None:
    said, _ = ranks.run(ended, 2)

    check_message(said, "rank 1")


def large(rank: int) -> tuple[bool, int]:
    """Take a mean of more numbers than a message holds, and count what stays in the store."""
    stride = evenstride.Stride(global_batch=8, policy="uniform")
    store = dist.distributed_c10d._get_default_store()
    total = torch.arange(70_000, dtype=torch.float64) * (rank + 1)
    right = torch.equal(
        torch.as_tensor(stride.mean(total, 1)), 1.5 * torch.arange(70_000, dtype=torch.float64)
    )
    dist.barrier()
    before = store.num_keys()
    for _ in range(50):
        stride.mean(1.0, 1)
    dist.barrier()
    more = store.num_keys() - before
    stride.close()
    return right, more


def test_a_mean_may_be_large_and_many_leave_nothing_in_the_store(ranks: RankPool) -> None:
    for right, more in ranks.run(large, 2):
        assert right
        assert more <= 10, "an exchange may be going on"
