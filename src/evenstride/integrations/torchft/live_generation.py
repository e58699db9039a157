"""One generation: the workers of a quorum, their leader, and their decisions.

The objects that hold decisions (schedule, barrier, recorder) are created for each generation and
discarded with it. So a decision of an old generation cannot apply in a new one. Knowledge of the
workers is kept: the leader keeps its `Control`, and after every exchange it sends the other workers
what it knows, so that another one can replace it.
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
"""Returns the texts of all workers, in rank order; collective."""

logger = logging.getLogger("evenstride")

# No worker can request an exchange between two of them, so they are at most so many steps apart.
MOST_STEPS = 16


class Broken(Exception):
    """Some worker of the quorum is gone: the current step is lost, but the next quorum may work."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """The workers that are connected for a step."""

    number: int  # torchft's number; changes when a worker joins, leaves or drops a step
    rank: int  # of this worker
    world_size: int  # number of workers, including those that still receive their weights


@dataclass(frozen=True, slots=True)
class Shown:
    """What one worker sends to the others of its quorum."""

    name: str  # of the worker, the same after a restart
    incarnation: str  # changes with each start of its process.
    kept: int  # steps it has kept, by torchft's count; with fewer than others it needs weights.
    generation: int  # its latest one; -1 for none
    leads: bool  # whether it led that one
    position: Plain  # in the data, as `CommittedPosition.save` returns it
    settings: Plain  # that all workers must share
    own: Plain  # of this worker: bounds and device
    micro: bool = False  # whether it may split its shares into micro-batches.
    weights: str = ""  # digest of its weights if it has kept no step since it started; else empty

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Shown:
        return cls(**json.loads(text))

    @property
    def worker(self) -> Worker:
        return Worker(self.name, **self.own)


def behind(shown: Sequence[Shown]) -> frozenset[int]:
    """Return the ranks that still receive weights, because others have kept more steps."""
    most = max(one.kept for one in shown)
    return frozenset(rank for rank, one in enumerate(shown) if one.kept < most)


def leader_of(shown: Sequence[Shown]) -> int:
    """Return the rank that leads: the last leader if it is up to date, else the first that is."""
    late = behind(shown)
    ranks = (rank for rank in range(len(shown)) if rank not in late)
    return max(ranks, key=lambda rank: (_led(shown[rank]), -rank))


def generation_of(shown: Sequence[Shown]) -> int:
    """Return the number of the generation that the workers form."""
    return max(one.generation for one in shown) + 1


def happenings(
    before: Membership, incarnations: Mapping[str, str], shown: Sequence[Shown]
) -> tuple[Happening, ...]:
    """Return what has happened to the workers of a generation, as the next one shows.

    ``incarnations`` are those of the workers of ``before``. The events are those in the table of
    `evenstride.core.membership.member_table`. A worker that fell behind leaves and joins again,
    because it has no weights to train with.
    """
    late = {shown[rank].name for rank in behind(shown)}
    now = {one.name: one.incarnation for one in shown}
    news, stayed = list[Happening](), set[str]()
    for worker in before.workers:
        if worker not in now:
            news.append(Happening(worker, MembershipEvent.LOST, why="it is not in the quorum"))
        elif now[worker] != incarnations.get(worker):
            news.append(Happening(worker, MembershipEvent.LOST, why="its process started again"))
        elif worker in late and before.standing(worker) is not MemberState.JOINING:
            news.append(Happening(worker, MembershipEvent.LOST, why="it missed a step"))
        else:
            stayed.add(worker)
    for worker in now:
        if worker not in stayed:
            news.append(Happening(worker, MembershipEvent.JOIN))
        if worker not in late and (
            worker not in stayed or before.standing(worker) is MemberState.JOINING
        ):
            news.append(
                Happening(worker, MembershipEvent.READY, why="its weights are those of the others")
            )
    return tuple(news)


def check_alike(shown: Sequence[Shown]) -> None:
    """Raise unless the workers can train together.

    Raises `RanksDisagree` if settings, names or first weights differ, and `SplitDiverged` if
    workers have kept equally many steps but are at different positions in the data.
    """
    names = [one.name for one in shown]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RanksDisagree(
            f"two workers have the name {twice}; give each its own name: LiveStride(name=...)"
        )
    first = shown[0]
    for one in shown[1:]:
        for key, value in one.settings.items():
            if value != first.settings.get(key):
                raise RanksDisagree(
                    f"the workers disagree on {key}: {first.settings.get(key)!r} on {first.name}, "
                    f"{value!r} on {one.name}; give every worker the same value"
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
                "trained; call torch.manual_seed with the same seed on every worker before "
                "creating the model, or load the same checkpoint"
            )
    for one in shown[1:]:
        if one.position != first.position:
            raise SplitDiverged(
                f"after {one.kept} steps {one.name} stands at {_where(one)}, but {first.name} at "
                f"{_where(first)}; load the same state on every worker, with the same loader"
            )


def _led(one: Shown) -> int:
    return one.generation if one.leads else -1


def _where(one: Shown) -> str:
    return f"epoch {one.position['epoch']}, sample {one.position['position']}"


class LeaderRecord:
    """What this worker knows as the leader, or needs to know as the next leader."""

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
        """Return what the leader announces to the workers of a new generation."""
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
        opening = leader.control.opening_left > 0
        return {"shares": leader.control.rank_shares, "opening": opening, **self._known(leader)}

    def exchange(self, step: int, replies: list[Reply], checksum: int) -> Plain:
        """Return the decision for the measurements of all workers, as it is sent to them."""
        assert self._leader is not None, "only the leader judges"
        verdict = self._leader.exchange(step, replies, checksum)
        message = {"verdict": verdict_to_plain(verdict), **self._known(self._leader)}
        self._leader.finish_exchange()
        return message

    def _begun(self, shown: Sequence[Shown], number: int, step: int) -> Leader:
        """Return a new leader with what the previous one has sent to this worker."""
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

    ``gather`` is collective over them. ``mine`` is what this worker sends to the others.
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
        formed = self._formed(lambda: lead.form(shown))
        step = self.position["step"]
        self.shares: Shares = tuple(formed["shares"])
        self.gate = DrawBarrier(self.shares, step=step, blocking=formed["opening"])
        policy = mine.settings["policy"]
        self.recorder = Recorder(quorum.rank, lambda: None, loads_for(policy_from_spec(policy)))
        self._next = self._due(formed, step)

    def exchange(self, step: int) -> None:
        """Let the leader decide if an exchange is due; collective, between two steps.

        Raises `Broken` if a worker is gone, and `SplitDiverged` if one has applied other decisions.
        """
        if step < self._next:
            return
        local = Local(
            self.gate, self.recorder, lambda: Position(step, ()), SaveSchedule(lambda: None)
        )
        mine = local.reply(self.gate.hold(standing=True))
        texts = self._gather(reply_to_text(mine))
        answer = self._answer(
            lambda: self._lead.exchange(step, list(map(reply_from_text, texts)), mine.checksum)
        )
        verdict = verdict_from_plain(answer["verdict"])
        self.shares = apply(verdict, self.quorum.rank, local, self.shares)
        self._next = self._due(answer, step)

    def _formed(self, judge: Callable[[], Plain]) -> Plain:
        """Return the leader's announcement; an error of a worker that joins ends only that one.

        For the other workers the error is `Broken`: they form a generation without it.
        """
        try:
            return self._answer(judge)
        except EvenstrideError as error:
            if self.late and self.quorum.rank not in self.late:
                late = ", ".join(self.names[rank] for rank in sorted(self.late))
                raise Broken(f"{late} cannot join: {error}") from error
            raise

    def _answer(self, judge: Callable[[], Plain]) -> Plain:
        """Return what the leader sends to all workers; its error is raised on every worker."""
        message: Plain = {}
        if self._leader == self.quorum.rank:
            try:
                message = {"ok": judge()}
            except EvenstrideError as error:
                message = {"error": to_plain(error)}
            except Exception as error:  # of any type: the others must not wait for ever
                logger.exception("the leader failed to decide")
                message = {"error": to_plain(EvenstrideError(f"no decision: {error!r}"))}
        reply = json.loads(self._gather(json.dumps(message))[self._leader])
        if "error" in reply:
            raise from_plain(reply["error"])
        answer: Plain = reply["ok"]
        self._lead.learn(answer)
        return answer

    def _due(self, answer: Plain, step: int) -> int:
        return min(int(answer["next"]), step + MOST_STEPS)
