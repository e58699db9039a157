"""What workers of a new quorum tell each other, and what follows from it. Needs no torchft."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from evenstride.core.fleet import Worker
from evenstride.core.membership.member_table import (
    Happening,
    Membership,
    MembershipEvent,
    MemberState,
)
from evenstride.errors import RanksDisagree, SplitDiverged
from evenstride.runtime.coordination.agreement import Plain


class Broken(Exception):
    """Some worker of the quorum is gone, so the step in hand cannot be; the next quorum can."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """The workers that are connected for a step.

    Args:
        number: torchft's number of it; changes whenever a worker comes, goes or dropped a step.
        rank: of this worker.
        world_size: number of workers, those included whose weights are still on their way.
    """

    number: int
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Shown:
    """What one worker tells the others of its quorum.

    Args:
        name: of the worker, the same after a restart.
        incarnation: another one after each start of its process.
        kept: steps it has kept, as torchft counts them; who has fewer than others needs weights.
        generation: the latest that it was in; -1 for none.
        leads: whether it led that one.
        position: where it stands in the data, as `CommittedPosition.save` returns it.
        settings: what all workers must have alike.
        own: what each has of its own: bounds and device.
        micro: whether it may cut its shares into micro-batches.
        weights: digest of its weights, if it has kept no step since it started; else empty.
    """

    name: str
    incarnation: str
    kept: int
    generation: int
    leads: bool
    position: Plain
    settings: Plain
    own: Plain
    micro: bool = False
    weights: str = ""

    def to_text(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Shown:
        """Return what `to_text` wrote."""
        return cls(**json.loads(text))

    @property
    def worker(self) -> Worker:
        """The worker, as the fleet knows it."""
        return Worker(self.name, **self.own)


def behind(shown: Sequence[Shown]) -> frozenset[int]:
    """Return the ranks whose weights are on their way, because others have kept more steps."""
    most = max(one.kept for one in shown)
    return frozenset(rank for rank, one in enumerate(shown) if one.kept < most)


def leader_of(shown: Sequence[Shown]) -> int:
    """Return the rank that leads: who led last, if it is up to date, else the first who is."""
    late = behind(shown)
    ranks = (rank for rank in range(len(shown)) if rank not in late)
    return max(ranks, key=lambda rank: (_led(shown[rank]), -rank))


def generation_of(shown: Sequence[Shown]) -> int:
    """Return the number of the generation that the workers form."""
    return max(one.generation for one in shown) + 1


def happenings(
    before: Membership, incarnations: Mapping[str, str], shown: Sequence[Shown]
) -> tuple[Happening, ...]:
    """Return what has happened to the members of a generation, as the next one shows.

    Args:
        before: the generation that was.
        incarnations: of its members' processes.
        shown: by all workers of the quorum now, in rank order.

    Returns:
        Changes that the table of `evenstride.core.membership.member_table` knows. Who fell behind
        leaves and comes in again, as it has no weights to train with.
    """
    late = {shown[rank].name for rank in behind(shown)}
    now = {one.name: one.incarnation for one in shown}
    told, stayed = list[Happening](), set[str]()
    for worker in before.workers:
        if worker not in now:
            told.append(Happening(worker, MembershipEvent.LOST, why="it is not in the quorum"))
        elif now[worker] != incarnations.get(worker):
            told.append(Happening(worker, MembershipEvent.LOST, why="its process started again"))
        elif worker in late and before.standing(worker) is not MemberState.JOINING:
            told.append(Happening(worker, MembershipEvent.LOST, why="it missed a step"))
        else:
            stayed.add(worker)
    for worker in now:
        if worker not in stayed:
            told.append(Happening(worker, MembershipEvent.JOIN))
        if worker not in late and (
            worker not in stayed or before.standing(worker) is MemberState.JOINING
        ):
            told.append(
                Happening(worker, MembershipEvent.READY, why="its weights are those of the others")
            )
    return tuple(told)


def check_alike(shown: Sequence[Shown]) -> None:
    """Raise unless the workers can train together.

    Raises:
        RanksDisagree: their settings or names differ, or they start from different weights.
        SplitDiverged: they have kept as many steps and stand at different data.
    """
    names = [one.name for one in shown]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RanksDisagree(
            f"two workers are called {twice}; give each a name of its own: LiveStride(name=...)"
        )
    first = shown[0]
    for one in shown[1:]:
        for key, value in one.settings.items():
            if value != first.settings.get(key):
                raise RanksDisagree(
                    f"the workers disagree on {key}: {first.settings.get(key)!r} on {first.name}, "
                    f"{value!r} on {one.name}; give every worker the same"
                )
    late = behind(shown)
    _check_state([one for rank, one in enumerate(shown) if rank not in late])


def _check_state(shown: Sequence[Shown]) -> None:
    first = shown[0]
    fresh = [one for one in shown if one.weights]
    for one in fresh[1:]:
        if one.weights != fresh[0].weights:
            raise RanksDisagree(
                f"{fresh[0].name} and {one.name} start from different weights, and neither has "
                "trained; call torch.manual_seed with the same seed on every worker before the "
                "model is made, or load the same checkpoint"
            )
    for one in shown[1:]:
        if one.position != first.position:
            raise SplitDiverged(
                f"after {one.kept} steps {one.name} stands at {_where(one)}, {first.name} at "
                f"{_where(first)}; load the same state on every worker, with the same loader"
            )


def _led(one: Shown) -> int:
    return one.generation if one.leads else -1


def _where(one: Shown) -> str:
    return f"epoch {one.position['epoch']}, sample {one.position['position']}"
