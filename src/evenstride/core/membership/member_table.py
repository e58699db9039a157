"""Who belongs to a run, as a table: a state and an event give the next state, or a refusal.

A *member* is a worker of the present generation's process group. A *generation* lasts as long as
nobody enters that group or leaves it; the global batch, the order of the samples and the position
in them are those of the run, whoever is in it. Runtime and simulator apply this very table.

=============  ===========================================================================
standing       what it means
=============  ===========================================================================
joining        in the group, but its weights are still on their way: it gets no samples
serving        gets a share
leaving        has been told that it will be taken away: gets no samples, still takes part
leaving early  the same, of one that was still joining
gone           not in the group
=============  ===========================================================================

`leave` says what to do about a worker that is leaving, by the time that is left. A notice gives
little of it: 120 s on some clouds, 30 s on others, next to none on a signal. So the worker's
samples go to the others at once, the state is saved, and it ends by itself with nothing lost; the
others would notice one that was taken only when connections break. Where notices may be withdrawn,
it goes on taking part without samples until shortly before its time, and the state is saved once
more then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from evenstride.errors import ConfigError

# A save may take so many times as long as the latest did.
_SAVE_SPREAD = 1.5
# Time for the decision to reach all, beyond the steps that are drawn already.
_DECISION_S = 1.0
# A worker ends before the time that its notice names by this much at least: it may take so long
# until the next exchange, and clocks differ.
_EARLY_S = 8.0


class MemberState(StrEnum):
    """What a worker is to the run."""

    JOINING = "joining"
    SERVING = "serving"
    LEAVING = "leaving"
    LEAVING_EARLY = "leaving early"
    GONE = "gone"


class MembershipEvent(StrEnum):
    """What may happen to a worker."""

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
    # Not leaving: without weights it must never serve, not even where all others are leaving too.
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
    # Its weights are still on their way.
    (_S.LEAVING_EARLY, _C.WITHDRAWN): _S.JOINING,
    (_S.LEAVING_EARLY, _C.LEAVE): _S.GONE,
    (_S.LEAVING_EARLY, _C.LOST): _S.GONE,
}
"""Every change that is possible; all others are refused and change nothing."""

_TOLD = {
    _C.JOIN: "has come in, and gets samples as soon as it is ready",
    _C.READY: "is ready",
    _C.NOTICE: "is to leave",
    _C.WITHDRAWN: "stays after all",
    _C.LEAVE: "has left as announced",
    _C.LOST: "is lost",
}


@dataclass(frozen=True, slots=True)
class Happening:
    """One change of one worker."""

    worker: str  # its name
    change: MembershipEvent  # what happened to it
    # Seconds until it is taken away, of a notice; ``None`` if it does not say.
    left_s: float | None = None
    why: str = ""  # what told so, for people
    final: bool = True  # whether a notice will not be withdrawn


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of the group."""

    worker: str
    standing: MemberState


@dataclass(frozen=True, slots=True)
class Transition:
    """What a happening came to."""

    worker: str  # its name
    before: MemberState  # its standing until then
    after: MemberState  # its standing from then on; the same if the change was refused
    refused: bool  # whether the table has no such change
    reason: str  # one sentence

    @property
    def regroups(self) -> bool:
        """Whether the process group has to be another one after it."""
        return (self.before is MemberState.GONE) != (self.after is MemberState.GONE)


@dataclass(frozen=True, slots=True)
class Membership:
    """The members of one generation, in rank order; no name twice, and nobody who is gone."""

    generation: int = 0  # 0 for the first; counts the process groups
    members: tuple[Member, ...] = ()  # all who are in the group

    def __post_init__(self) -> None:
        names = self.workers
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(
                f"two workers are called {twice}; each needs a name of its own: host and rank"
            )
        if any(member.standing is MemberState.GONE for member in self.members):
            raise ConfigError("who is gone is no member; leave it out")

    @classmethod
    def formed(cls, generation: int, workers: tuple[str, ...]) -> Membership:
        """Return the membership of a group that has met with equal weights: all serve."""
        return cls(generation, tuple(Member(worker, MemberState.SERVING) for worker in workers))

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(member.worker for member in self.members)

    @property
    def serving(self) -> tuple[int, ...]:
        """Places of those who get samples, ascending.

        Where all that could serve are leaving, they go on until they are taken away: somebody
        must hold the global batch.
        """
        of = {s: [k for k, m in enumerate(self.members) if m.standing is s] for s in MemberState}
        return tuple(of[MemberState.SERVING] or of[MemberState.LEAVING])

    def standing(self, worker: str) -> MemberState:
        known = (m.standing for m in self.members if m.worker == worker)
        return next(known, MemberState.GONE)

    def after(self, happening: Happening) -> tuple[Membership, Transition]:
        """Return the membership after one change, and what it came to."""
        worker, change = happening.worker, happening.change
        before = self.standing(worker)
        standing = TABLE.get((before, change))
        if standing is None:
            possible = ", ".join(c for s, c in TABLE if s is before)
            reason = (
                f"{worker} cannot {_asked(change)}, as it is {before}; possible now: {possible}"
            )
            return self, Transition(worker, before, before, True, reason)
        transition = Transition(worker, before, standing, False, _reason(happening))
        return self._with(worker, standing, transition.regroups), transition

    def after_all(
        self, happenings: tuple[Happening, ...]
    ) -> tuple[Membership, tuple[Transition, ...]]:
        """Return the membership after changes that are known at once: one new group at most."""
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
    return {_C.READY: "be ready", _C.NOTICE: "be told to leave", _C.LOST: "be lost"}.get(
        change, "stay after all" if change is _C.WITHDRAWN else str(change)
    )


def _reason(happening: Happening) -> str:
    when = ""
    if happening.change is MembershipEvent.NOTICE and happening.left_s is not None:
        when = f" in {max(happening.left_s, 0.0):.0f} s"
    why = f" ({happening.why})" if happening.why else ""
    return f"{happening.worker} {_TOLD[happening.change]}{when}{why}"


@dataclass(frozen=True, slots=True)
class DepartureOrder:
    """What is done about one notice."""

    save: bool  # whether the state is saved now
    go: bool  # whether the worker ends after that
    reason: str  # a clause for people


def needed_s(save_s: float, ahead_s: float) -> float:
    return _SAVE_SPREAD * save_s + ahead_s + _DECISION_S


def leave(
    left_s: float | None, save_s: float | None, ahead_s: float, *, final: bool, again: bool
) -> DepartureOrder:
    """Return what to do about a worker that is to leave.

    It is taken away in ``left_s``; ``None`` if it should go as soon as possible. A checkpoint takes
    ``save_s``; ``None`` if the run takes none. The decision takes effect in ``ahead_s``, after the
    steps that are drawn already. ``final`` says that the notice will not be withdrawn, ``again``
    that the state was saved for it before.
    """
    if save_s is None:
        return DepartureOrder(False, False, "the run saves no checkpoints")
    needs_s = needed_s(save_s, ahead_s)
    if left_s is not None and left_s < needs_s:
        short = f"{max(left_s, 0):.0f} s are too short for a checkpoint ({needs_s:.0f} s)"
        return DepartureOrder(False, True, f"{short}, so it ends")
    # To stay, there must be time for two saves: one now and one just before the worker goes.
    if final or left_s is None or left_s < 2 * needs_s + _EARLY_S:
        return DepartureOrder(True, True, "the state is saved, then it ends")
    if again:
        return DepartureOrder(False, False, "it takes part without samples until then")
    return DepartureOrder(
        True, False, "the state is saved, and it takes part without samples until then"
    )
