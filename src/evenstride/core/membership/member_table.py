"""The members of a run, as a table: a state and an event give the next state, or are rejected.

A *member* is a worker of the current generation's process group. A *generation* lasts as long as
no worker joins or leaves that group. The global batch, the order of the samples and the position in
the data belong to the run, whatever its members. Runtime and simulator use the same table.

=============  ===========================================================================
standing       meaning
=============  ===========================================================================
joining        in the group, but its weights have not arrived: it gets no samples.
serving        gets a share.
leaving        has received a notice: gets no samples, still takes part.
leaving early  the same, for a worker that was still joining.
gone           not in the group.
=============  ===========================================================================

`leave` decides what to do about a worker that is leaving, by the remaining time. A notice gives
little time: 120 s on some clouds, 30 s on others, almost none on a signal. So the other workers
take over its samples at once, the state is saved, and the worker exits with nothing lost. Without a
notice, the others detect the loss only when connections break. If notices can be withdrawn, the
worker takes part without samples until shortly before the deadline, and the state is saved once
more then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from evenstride.errors import ConfigError

# A save may take this many times as long as the latest one.
_SAVE_SPREAD = 1.5
# Time for the decision to reach all ranks, beyond the steps already drawn.
_DECISION_S = 1.0
# A worker exits at least this much before the deadline of its notice: the next exchange may be this
# far away, and clocks differ.
_EARLY_S = 8.0


class MemberState(StrEnum):
    """The standing of a worker in the run."""

    JOINING = "joining"
    SERVING = "serving"
    LEAVING = "leaving"
    LEAVING_EARLY = "leaving early"
    GONE = "gone"


class MembershipEvent(StrEnum):
    """What can happen to a worker."""

    JOIN = "join"
    READY = "ready"
    NOTICE = "notice"
    WITHDRAWN = "withdrawn"
    LEAVE = "leave"
    LOST = "lost"


_S, _C = MemberState, MembershipEvent

TABLE: dict[tuple[MemberState, MembershipEvent], MemberState] = {
    (_S.GONE, _C.JOIN): _S.JOINING,
    (_S.JOINING, _C.READY): _S.SERVING,
    # Not leaving: without weights it must never serve, not even if all others are leaving too.
    (_S.JOINING, _C.NOTICE): _S.LEAVING_EARLY,
    (_S.JOINING, _C.LEAVE): _S.GONE,
    (_S.JOINING, _C.LOST): _S.GONE,
    (_S.SERVING, _C.NOTICE): _S.LEAVING,
    (_S.SERVING, _C.LEAVE): _S.GONE,
    (_S.SERVING, _C.LOST): _S.GONE,
    (_S.LEAVING, _C.NOTICE): _S.LEAVING,  # at another time
    (_S.LEAVING, _C.WITHDRAWN): _S.SERVING,
    (_S.LEAVING, _C.LEAVE): _S.GONE,
    (_S.LEAVING, _C.LOST): _S.GONE,
    (_S.LEAVING_EARLY, _C.NOTICE): _S.LEAVING_EARLY,
    (_S.LEAVING_EARLY, _C.READY): _S.LEAVING,
    # Its weights have not arrived.
    (_S.LEAVING_EARLY, _C.WITHDRAWN): _S.JOINING,
    (_S.LEAVING_EARLY, _C.LEAVE): _S.GONE,
    (_S.LEAVING_EARLY, _C.LOST): _S.GONE,
}
"""Every possible change; all others are rejected and change nothing."""

_TEXTS = {
    _C.JOIN: "has joined, and gets samples as soon as it is ready",
    _C.READY: "is ready",
    _C.NOTICE: "will leave",
    _C.WITHDRAWN: "stays, because its notice was withdrawn",
    _C.LEAVE: "has left as announced",
    _C.LOST: "is lost",
}


@dataclass(frozen=True, slots=True)
class Happening:
    """One change of one worker."""

    worker: str  # its name
    change: MembershipEvent  # what happened to it
    # For a notice, seconds until the preemption; ``None`` if unknown.
    left_s: float | None = None
    why: str = ""  # source of the information, for display
    final: bool = True  # whether a notice will not be withdrawn


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of the group."""

    worker: str
    standing: MemberState


@dataclass(frozen=True, slots=True)
class Transition:
    """The result of a happening."""

    worker: str  # its name
    before: MemberState  # its standing before
    after: MemberState  # its standing after; the same if the change was rejected
    refused: bool  # whether the table has no such change
    reason: str  # one sentence

    @property
    def regroups(self) -> bool:
        """Whether it requires a new process group."""
        return (self.before is MemberState.GONE) != (self.after is MemberState.GONE)


@dataclass(frozen=True, slots=True)
class Membership:
    """The members of one generation, in rank order; names are unique, and no member is gone."""

    generation: int = 0  # 0 for the first; counts the process groups
    members: tuple[Member, ...] = ()  # all workers of the group

    def __post_init__(self) -> None:
        names = self.workers
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(
                f"two workers have the name {twice}; give each a unique name of host and rank"
            )
        if any(member.standing is MemberState.GONE for member in self.members):
            raise ConfigError("a worker that is gone cannot be a member; leave it out")

    @classmethod
    def formed(cls, generation: int, workers: tuple[str, ...]) -> Membership:
        """Return the membership of a group that starts with equal weights: all serve."""
        return cls(generation, tuple(Member(worker, MemberState.SERVING) for worker in workers))

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(member.worker for member in self.members)

    @property
    def serving(self) -> tuple[int, ...]:
        """Places of the workers that get samples, ascending.

        If all workers that could serve are leaving, they continue until they are gone, because the
        global batch must be held.
        """
        of = {s: [k for k, m in enumerate(self.members) if m.standing is s] for s in MemberState}
        return tuple(of[MemberState.SERVING] or of[MemberState.LEAVING])

    def standing(self, worker: str) -> MemberState:
        known = (m.standing for m in self.members if m.worker == worker)
        return next(known, MemberState.GONE)

    def after(self, happening: Happening) -> tuple[Membership, Transition]:
        """Return the membership after one change, and the transition."""
        worker, change = happening.worker, happening.change
        before = self.standing(worker)
        standing = TABLE.get((before, change))
        if standing is None:
            possible = ", ".join(c for s, c in TABLE if s is before)
            reason = (
                f"{worker} cannot {_asked(change)}, because it is {before}; possible: {possible}"
            )
            return self, Transition(worker, before, before, True, reason)
        transition = Transition(worker, before, standing, False, _reason(happening))
        return self._with(worker, standing, transition.regroups), transition

    def after_all(
        self, happenings: tuple[Happening, ...]
    ) -> tuple[Membership, tuple[Transition, ...]]:
        """Return the membership after simultaneous changes: at most one new group."""
        membership, transitions = self, list[Transition]()
        for happening in happenings:
            membership, transition = membership.after(happening)
            transitions.append(transition)
        regroups = any(transition.regroups for transition in transitions)
        return replace(membership, generation=self.generation + regroups), tuple(transitions)

    def _with(self, worker: str, standing: MemberState, regroups: bool) -> Membership:
        if standing is MemberState.GONE:
            members = tuple(m for m in self.members if m.worker != worker)
        elif worker in self.workers:
            members = tuple(
                replace(m, standing=standing) if m.worker == worker else m for m in self.members
            )
        else:
            # Last, so that the ranks of the others stay as they are.
            members = (*self.members, Member(worker, standing))
        return Membership(self.generation + regroups, members)


def _asked(change: MembershipEvent) -> str:
    return {_C.READY: "become ready", _C.NOTICE: "receive a notice", _C.LOST: "be lost"}.get(
        change, "withdraw a notice" if change is _C.WITHDRAWN else str(change)
    )


def _reason(happening: Happening) -> str:
    when = ""
    if happening.change is MembershipEvent.NOTICE and happening.left_s is not None:
        when = f" in {max(happening.left_s, 0.0):.0f} s"
    why = f" ({happening.why})" if happening.why else ""
    return f"{happening.worker} {_TEXTS[happening.change]}{when}{why}"


@dataclass(frozen=True, slots=True)
class DepartureOrder:
    """The response to one notice."""

    save: bool  # whether the state is saved now
    go: bool  # whether the worker exits after that
    reason: str  # a clause for display


def needed_s(save_s: float, ahead_s: float) -> float:
    return _SAVE_SPREAD * save_s + ahead_s + _DECISION_S


def leave(
    left_s: float | None, save_s: float | None, ahead_s: float, *, final: bool, again: bool
) -> DepartureOrder:
    """Return the response to a notice.

    The preemption is in ``left_s``; ``None`` if the worker should exit as soon as possible. A
    checkpoint takes ``save_s``; ``None`` if the run saves none. The decision takes effect in
    ``ahead_s``, after the steps already drawn. ``final`` says that the notice will not be
    withdrawn, ``again`` that the state was already saved for it.
    """
    if save_s is None:
        return DepartureOrder(False, False, "the run saves no checkpoints")
    needs_s = needed_s(save_s, ahead_s)
    if left_s is not None and left_s < needs_s:
        short = f"{max(left_s, 0):.0f} s are too short for a checkpoint ({needs_s:.0f} s)"
        return DepartureOrder(False, True, f"{short}, so it exits without one")
    # To stay, there must be time for two saves: one now and one just before the worker exits.
    if final or left_s is None or left_s < 2 * needs_s + _EARLY_S:
        return DepartureOrder(True, True, "the state is saved, then it exits")
    if again:
        return DepartureOrder(False, False, "it stays in the group without samples until then")
    return DepartureOrder(
        True, False, "the state is saved, and it stays in the group without samples until then"
    )
