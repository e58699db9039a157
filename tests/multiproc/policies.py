"""A run of several short epochs by a given policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import evenstride
from evenstride.core import Fleet
from evenstride.core.sync_modes import LocalSgd
from tests.multiproc.training import net, rows


def trained(rank: int, folder: Path, epochs: int, steps: int, policy: str) -> None:
    """Train epochs of some steps each."""
    del rank
    _train(evenstride.Stride(16, policy=policy, trace=folder), epochs, steps)


def trained_on(
    rank: int, folder: Path, epochs: int, steps: int, policy: evenstride.Policy[Any] | str
) -> list[list[int]]:
    """Train epochs of some steps each, and return the rank's samples of every step."""
    del rank
    return _train(evenstride.Stride(16, policy=policy, trace=folder), epochs, steps)


def _train(stride: evenstride.Stride, epochs: int, steps: int) -> list[list[int]]:
    drawn = []
    loader = stride.loader(rows(16 * steps))
    model = stride.watch(DistributedDataParallel(net()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for ids, x, y in loader:
            drawn.append(ids.tolist())
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    stride.close()
    return drawn


@dataclass(frozen=True)
class TakeTurns:
    """A policy of a user's own: the split turns round at each decision. The state counts them."""

    low: int
    opening_steps: int = 0

    def init(self, fleet: Fleet) -> tuple[int, evenstride.Move]:
        """Begin with the low share for the first worker."""
        return 0, evenstride.Move((self.low, fleet.global_batch - self.low), "the first turn")

    def decide(
        self, state: int, situation: evenstride.Situation
    ) -> tuple[int, evenstride.Keep | evenstride.Move]:
        """Turn the split round."""
        one, other = situation.shares
        return state + 1, evenstride.Move((other, one), f"turn {state + 1}")


class Notebook:
    """A sink of a user's own: counts the snapshots that it gets."""

    def __init__(self, path: Path) -> None:
        self._path, self._reported = path, 0

    def write(self, snapshot: evenstride.Snapshot) -> None:
        """Count."""
        self._reported += bool(snapshot.samples)

    def close(self) -> None:
        """Write the count down."""
        self._path.write_text(str(self._reported))


def trained_by_objects(rank: int, folder: Path, steps: int) -> None:
    """Train with a policy, a mode and a sink that are objects."""
    stride = evenstride.Stride(
        16,
        policy=TakeTurns(low=4),
        sync=LocalSgd(every=2),
        sinks=[Notebook(folder / "notebook"), f"csv:{folder / 'metrics.csv'}"],
        trace=folder,
    )
    _train(stride, 1, steps)


def named_otherwise(rank: int) -> str:
    """Return the refusal of ranks whose policies of their own differ."""
    with pytest.raises(evenstride.RanksDisagree) as refused:
        evenstride.Stride(16, policy=TakeTurns(low=4 + rank))
    return str(refused.value)
