"""The exact mean over all ranks, by way of the process group's store.

No collective takes part. One that a single rank starts would pair with whatever the other ranks
send next, such as their gradients. In the store the ranks meet first, and a rank that does not
come is named.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from evenstride.errors import RanksDisagree
from evenstride.runtime.coordination.agreement import Plain, require_equal

Agree = Callable[[Callable[[], Plain], Callable[[list[Plain]], Plain]], Plain]
"""Lets all ranks show something and the leader judge it."""

# Values per message, 512 KiB of them: a store takes messages of up to 8 MiB.
_MOST_VALUES = 2**16


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's call of `Stride.mean`, as the other ranks must have made it, too.

    Args:
        name: under which the mean is recorded.
        shape: of the total; empty for one number.
        steps: that the rank has committed.
        in_loop: whether its training loop is running.
    """

    name: str | None
    shape: tuple[int, ...]
    steps: int
    in_loop: bool

    def to_plain(self) -> Plain:
        """Return the call as JSON types."""
        return {**asdict(self), "shape": list(self.shape)}


def exact_mean(
    total: float | Tensor, count: float | Tensor, summed: Callable[[Tensor], Tensor] | None = None
) -> float | Tensor:
    """Return the sum of all ranks' totals over the sum of their counts.

    Summed in float64. A tensor of several elements gives a tensor of the same shape, anything
    else a float. With a count of 0 over all ranks the result is nan.

    Args:
        total: this rank's.
        count: likewise.
        summed: returns the sums of all ranks' values; ``None`` for this rank alone.
    """
    totals = torch.as_tensor(total, dtype=torch.float64, device="cpu").detach()
    sums = torch.cat([totals.reshape(-1), torch.tensor([float(count)], dtype=torch.float64)])
    if summed is not None:
        sums = summed(sums)
    mean = sums[:-1] / sums[-1]
    return float(mean) if totals.numel() == 1 else mean.reshape(totals.shape)


def sum_over_ranks(values: Tensor, call: Call, agree: Agree) -> Tensor:
    """Return the sums of all ranks' values; every rank makes the same call.

    Args:
        values: ``(n,)`` float64, of this rank.
        call: that they belong to.
        agree: see `Agree`.

    Raises:
        RanksDisagree: a rank made another call, or made it at another place.
        WorkerLost: a rank is gone.
    """

    def show(piece: Tensor) -> Plain:
        return {**call.to_plain(), "values": _text(piece)}

    pieces = torch.split(values, _MOST_VALUES)
    return torch.cat([_numbers(agree(partial(show, piece), _judged)["sums"]) for piece in pieces])


def _judged(shown: list[Plain]) -> Plain:
    places: dict[str, list[int]] = {}
    for rank, mine in enumerate(shown):
        places.setdefault(_place(mine), []).append(rank)
    if len(places) > 1:
        told = "; ".join(
            f"{place} on rank {', '.join(map(str, ranks[:8]))}" for place, ranks in places.items()
        )
        raise RanksDisagree(
            f"the ranks called mean() at different places: {told}; every rank must call it equally "
            "often and at the same places"
        )
    require_equal([{"name": mine["name"], "shape": mine["shape"]} for mine in shown], "mean()")
    return {"sums": _text(torch.stack([_numbers(mine["values"]) for mine in shown]).sum(0))}


def _place(shown: Plain) -> str:
    where = "inside the training loop" if shown["in_loop"] else "outside the training loop"
    return f"{where} after {shown['steps']} steps"


def _text(values: Tensor) -> str:
    # As bytes, so that no digit is rounded on the way.
    return base64.b64encode(values.numpy().tobytes()).decode()


def _numbers(text: str) -> Tensor:
    # Copied, as the array of a bytes object is read-only and torch's tensors are not.
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.float64).copy())
