"""One generation: the workers of a quorum, their leader, and the decisions made among them.

Everything that decisions live in (schedule, gate, recorder) is made anew for each generation and
thrown away with it, so no decision of an old one can apply in a new one. What goes on is what is
known of the workers: the leader keeps its `Control`, and after every exchange it tells all others
what it knows, so that another one can take its place.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from evenstride.core.control.events import FleetFormed, Recalled
from evenstride.core.control.state import Control
from evenstride.core.fleet import Shares, Worker
from evenstride.core.membership.member_table import (
    Happening,
    Membership,
    MembershipEvent,
    MemberState,
)
from evenstride.core.membership.worker_profiles import WorkerProfile
from evenstride.core.policies import policy_from_spec
from evenstride.errors import EvenstrideError, RanksDisagree, SplitDiverged, from_plain, to_plain
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.coordination.control_plane import Local, apply
from evenstride.runtime.coordination.draw_barrier import DrawBarrier, Position
from evenstride.runtime.coordination.leader import (
    Leader,
    Reply,
    reply_from_text,
    reply_to_text,
    verdict_from_plain,
    verdict_to_plain,
)
from evenstride.runtime.coordination.side_agreements import SaveSchedule
from evenstride.runtime.host.machine_resources import loads_for
from evenstride.runtime.timing.recorder import Recorder

Gather = Callable[[str], list[str]]
"""Returns the texts of all workers, in the order of their ranks; collective."""

logger = logging.getLogger("evenstride")

# Nobody can ask for an exchange between two of them, so they are never further apart.
MOST_STEPS = 16


class Broken(Exception):
    """Some worker of the quorum is gone, so the step in hand cannot be; the next quorum can."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """The workers that are connected for a step."""

    number: int  # torchft's number of it; changes whenever a worker comes, goes or dropped a step
    rank: int  # of this worker
    world_size: int  # number of workers, those included whose weights are still on their way


@dataclass(frozen=True, slots=True)
class Shown:
    """What one worker tells the others of its quorum."""

    name: str  # of the worker, the same after a restart
    incarnation: str  # another one after each start of its process
    kept: int  # steps it has kept, as torchft counts them; who has fewer than others needs weights
    generation: int  # the latest that it was in; -1 for none
    leads: bool  # whether it led that one
    position: Plain  # where it stands in the data, as `CommittedPosition.save` returns it
    settings: Plain  # what all workers must have alike
    own: Plain  # what each has of its own: bounds and device
    micro: bool = False  # whether it may cut its shares into micro-batches
    weights: str = ""  # digest of its weights, if it has kept no step since it started; else empty

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Shown:
        return cls(**json.loads(text))

    @property
    def worker(self) -> Worker:
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

    ``incarnations`` are of the processes of those ``before``. The changes are those that the table
    of `evenstride.core.membership.member_table` knows. Who fell behind leaves and comes in again,
    as it has no weights to train with.
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

    `RanksDisagree` says that settings, names or first weights differ, `SplitDiverged` that they
    have kept as many steps and stand at different data.
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


class LeaderRecord:
    """What this worker knows as the leader, or would need to know as the next one."""

    def __init__(self, policy: str, global_batch: int) -> None:
        self._policy, self._global_batch = policy, global_batch
        self._leader: Leader | None = None
        self._incarnations: dict[str, str] = {}
        self._profiles: list[Plain] = []

    @property
    def leads(self) -> bool:
        """Whether this worker led the latest generation."""
        return self._leader is not None

    def learn(self, message: Plain) -> None:
        """Remember what the leader knows of the workers."""
        self._profiles = message["profiles"]

    def retire(self) -> None:
        """Note that another worker leads."""
        self._leader = None

    def form(self, shown: Sequence[Shown]) -> Plain:
        """Return what all workers are told of the generation they form."""
        check_alike(shown)
        number, step = generation_of(shown), shown[leader_of(shown)].position["step"]
        leader = self._leader
        workers = tuple(one.worker for one in shown)
        if leader is None:
            leader = self._begun(shown, number, step)
        else:
            news = happenings(leader.control.membership, self._incarnations, shown)
            leader.form(FleetFormed(number, step, self._global_batch, workers, news))
        self._leader = leader
        self._incarnations = {one.name: one.incarnation for one in shown}
        told = {"shares": leader.control.rank_shares, "opening": leader.control.opening_left > 0}
        return {**told, **self._known(leader)}

    def exchange(self, step: int, replies: list[Reply], checksum: int) -> Plain:
        """Return the verdict on what all workers have measured, as all are told."""
        assert self._leader is not None, "only the leader judges"
        verdict = self._leader.exchange(step, replies, checksum)
        return {"verdict": verdict_to_plain(verdict), **self._known(self._leader)}

    def _begun(self, shown: Sequence[Shown], number: int, step: int) -> Leader:
        """Return a new leader, which knows what the one before it told this worker."""
        leader = Leader(Control(policy_from_spec(self._policy), memory_fraction=None))
        late = behind(shown)
        serving = tuple(one.worker for rank, one in enumerate(shown) if rank not in late)
        leader.form(FleetFormed(number, step, self._global_batch, serving))
        if self._profiles:
            profiles = tuple(WorkerProfile.from_plain(plain) for plain in self._profiles)
            leader.recall(Recalled(step, step, profiles, number))
        if late:
            news = tuple(Happening(shown[rank].name, MembershipEvent.JOIN) for rank in sorted(late))
            workers = tuple(one.worker for one in shown)
            leader.form(FleetFormed(number, step, self._global_batch, workers, news))
        return leader

    def _known(self, leader: Leader) -> Plain:
        profiles = [profile.to_plain() for profile in leader.control.known]
        return {"next": leader.exchange_at, "profiles": profiles}


class LiveGeneration:
    """The workers of a quorum, as one of them sees it.

    ``gather`` is collective over them. ``mine`` is what this worker tells the others.
    """

    def __init__(self, quorum: Quorum, lead: LeaderRecord, gather: Gather, mine: Shown) -> None:
        self.quorum, self._lead, self._gather = quorum, lead, gather
        shown = [Shown.from_text(text) for text in gather(mine.to_text())]
        self.number, self.late = generation_of(shown), behind(shown)
        self.names = tuple(one.name for one in shown)
        self._leader = leader_of(shown)
        self.position = shown[self._leader].position
        self.micro = any(one.micro for one in shown)
        if self._leader != quorum.rank:
            lead.retire()
        told = self._formed(lambda: lead.form(shown))
        step = self.position["step"]
        self.shares: Shares = tuple(told["shares"])
        self.gate = DrawBarrier(self.shares, step=step, blocking=told["opening"])
        policy = mine.settings["policy"]
        self.recorder = Recorder(quorum.rank, lambda: None, loads_for(policy_from_spec(policy)))
        self._next = self._due(told, step)

    def exchange(self, step: int) -> None:
        """Let the leader decide, if it is time; collective, between two steps.

        `Broken` says that a worker is gone, `SplitDiverged` that one has applied other decisions.
        """
        if step < self._next:
            return
        local = Local(
            self.gate, self.recorder, lambda: Position(step, ()), SaveSchedule(lambda: None)
        )
        mine = local.reply(self.gate.hold(standing=True))
        texts = self._gather(reply_to_text(mine))
        told = self._told(
            lambda: self._lead.exchange(step, list(map(reply_from_text, texts)), mine.checksum)
        )
        verdict = verdict_from_plain(told["verdict"])
        self.shares = apply(verdict, self.quorum.rank, local, self.shares)
        self._next = self._due(told, step)

    def _formed(self, judge: Callable[[], Plain]) -> Plain:
        """Return what the leader tells all; a newcomer that is refused does not end the others.

        For those who were there before, its refusal is `Broken`: they meet again without it.
        """
        try:
            return self._told(judge)
        except EvenstrideError as error:
            if self.late and self.quorum.rank not in self.late:
                late = ", ".join(self.names[rank] for rank in sorted(self.late))
                raise Broken(f"{late} cannot be taken in: {error}") from error
            raise

    def _told(self, judge: Callable[[], Plain]) -> Plain:
        """Return what the leader tells all workers; its error is raised on every one."""
        message: Plain = {}
        if self._leader == self.quorum.rank:
            try:
                message = {"ok": judge()}
            except EvenstrideError as error:
                message = {"error": to_plain(error)}
            except Exception as error:  # the others must not wait for ever
                logger.exception("the leader could not decide")
                message = {"error": to_plain(EvenstrideError(f"no decision: {error!r}"))}
        answer = json.loads(self._gather(json.dumps(message))[self._leader])
        if "error" in answer:
            raise from_plain(answer["error"])
        told: Plain = answer["ok"]
        self._lead.learn(told)
        return told

    def _due(self, told: Plain, step: int) -> int:
        return min(int(told["next"]), step + MOST_STEPS)
