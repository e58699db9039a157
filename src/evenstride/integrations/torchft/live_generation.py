"""One generation: the workers of a quorum, their leader, and the decisions made among them.

Everything that decisions live in (schedule, gate, recorder) is made anew for each generation and
thrown away with it, so no decision of an old one can apply in a new one. What goes on is what is
known of the workers: the leader keeps its `Control`, and after every exchange it tells all others
what it knows, so that another one can take its place.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence

from evenstride.core.control.events import FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Shares
from evenstride.core.membership.member_table import Happening, MembershipEvent
from evenstride.core.membership.worker_profiles import WorkerProfile
from evenstride.core.policies import policy_from_spec
from evenstride.errors import EvenstrideError, from_plain, to_plain
from evenstride.integrations.torchft.quorum_messages import (
    Broken,
    Quorum,
    Shown,
    behind,
    check_alike,
    generation_of,
    happenings,
    leader_of,
)
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.coordination.control_plane import Local, apply
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.coordination.messages import (
    Position,
    Reply,
    reply_from_text,
    reply_to_text,
    verdict_from_plain,
    verdict_to_plain,
)
from evenstride.runtime.coordination.save_schedule import SaveSchedule
from evenstride.runtime.host.host_load import loads_for
from evenstride.runtime.timing.recorder import Recorder

Gather = Callable[[str], list[str]]
"""Returns the texts of all workers, in the order of their ranks; collective."""

logger = logging.getLogger("evenstride")

# Nobody can ask for an exchange between two of them, so they are never further apart.
MOST_STEPS = 16


class LeaderRecord:
    """What this worker knows as the leader, or would need to know as the next one.

    Args:
        policy: specification of the policy.
        global_batch: samples per step.
    """

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
        """Return what all workers are told of the generation they form.

        Raises:
            EvenstrideError: they cannot train together, or not hold the global batch.
        """
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
            leader.recall(step, profiles, number)
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

    Args:
        quorum: that they are in.
        lead: what this worker knows.
        gather: collective over them.
        mine: what this worker tells the others.
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

        Raises:
            Broken: a worker is gone.
            SplitDiverged: a worker has applied other decisions.
        """
        if step < self._next:
            return
        held = self.gate.hold(standing=True)
        assert held is not None, "a gate is never stopped here"
        self.gate.forget_before(step - 1)
        reply = Reply(held.barrier, held.checksum, (), self.recorder.take())
        texts = self._gather(reply_to_text(reply))
        told = self._told(
            lambda: self._lead.exchange(step, list(map(reply_from_text, texts)), held.checksum)
        )
        local = Local(
            self.gate, self.recorder, lambda: Position(step, ()), SaveSchedule(lambda: None)
        )
        verdict = verdict_from_plain(told["verdict"])
        self.shares = apply(verdict, self.quorum.rank, local, self.shares)
        self._next = self._due(told, step)

    def _formed(self, judge: Callable[[], Plain]) -> Plain:
        """Return what the leader tells all; a newcomer that is refused does not end the others.

        Raises:
            EvenstrideError: this worker cannot train with the others, or they with each other.
            Broken: a newcomer cannot train with the others, which this worker is one of.
        """
        try:
            return self._told(judge)
        except EvenstrideError as error:
            if self.late and self.quorum.rank not in self.late:
                late = ", ".join(self.names[rank] for rank in sorted(self.late))
                raise Broken(f"{late} cannot be taken in: {error}") from error
            raise

    def _told(self, judge: Callable[[], Plain]) -> Plain:
        """Return what the leader tells all workers; collective.

        Raises:
            EvenstrideError: that the leader could not decide, alike on every worker.
        """
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
