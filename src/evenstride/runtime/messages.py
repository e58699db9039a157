"""What a rank tells the leader in an exchange, and what the leader tells all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evenstride.core.caps import Held
from evenstride.core.events import (
    ExchangeAfter,
    Expect,
    Instruction,
    KeepShares,
    LetGo,
    SaveAfter,
    SetBatch,
    SetShares,
)
from evenstride.core.fleet import Shares
from evenstride.core.gradient_parts import StepParts
from evenstride.core.observation import Observation
from evenstride.runtime.desk import Told
from evenstride.runtime.turn import Turn


@dataclass(frozen=True, slots=True)
class Reply:
    """What one rank answers when the leader asks.

    Args:
        barrier: first step the rank has not drawn and will not draw before the decision.
        checksum: of all decisions the rank has applied.
        stands: (step, epoch, position) where the rank's latest passes over the loader began.
        observations: what it measured since it was last asked.
        leaving: the rank's program is ending.
        held: the memory it held since then, if it is watched.
        notice: that it will be taken away, if it knows so.
        norms: of its gradients in the steps measured since then.
        drawn: first step that it has not drawn by now.
        turn: where it stands still until the batch is decided, if it does.
    """

    barrier: int
    checksum: int
    stands: tuple[tuple[int, int, int], ...]
    observations: tuple[Observation, ...]
    leaving: bool = False
    held: Held | None = None
    notice: Told | None = None
    norms: tuple[StepParts, ...] = ()
    drawn: int = 0
    turn: Turn | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the leader tells all ranks after an exchange.

    Args:
        effective: first step the decision is about.
        shares: the ranks' new shares from that step on, or ``None`` to keep them.
        opening: whether the next step waits for a decision as well.
        expected_s: expected busy time of each rank; 0 for none.
        band: half-width of each rank's band, as a part.
        reason: one sentence.
        save_after: all ranks save a checkpoint when so many steps are committed; ``None`` for no.
        go_after: when so many are, the ranks of ``going`` end; ``None`` if nobody does.
        going: these ranks.
        why_going: for people.
        batch: global batch with which all go on who stand at a turn; ``None`` where not all do.
    """

    effective: int
    shares: Shares | None
    opening: bool
    expected_s: tuple[float, ...]
    band: tuple[float, ...]
    reason: str
    save_after: int | None = None
    go_after: int | None = None
    going: tuple[int, ...] = ()
    why_going: str = ""
    batch: int | None = None


def verdict_of(
    effective: int, instructions: tuple[Instruction, ...]
) -> tuple[Verdict, ExchangeAfter]:
    """Return what instructions of the core come to, and when to exchange again.

    Ranks are numbered as the core numbers them: islands, where there are some.
    """
    verdict, after = Verdict(effective, None, False, (), (), ""), ExchangeAfter(1, False)
    for one in instructions:
        match one:
            case SetShares():
                reason = one.reason if verdict.batch is None else f"{verdict.reason}; {one.reason}"
                verdict = replace(verdict, shares=one.shares, reason=reason)
            case SetBatch():
                verdict = replace(verdict, batch=one.global_batch, reason=one.reason)
            case KeepShares():
                verdict = replace(verdict, reason=one.reason)
            case Expect():
                verdict = replace(verdict, expected_s=one.expected_s, band=one.band)
            case SaveAfter():
                verdict = replace(verdict, save_after=one.steps)
            case LetGo():
                verdict = replace(
                    verdict, go_after=one.steps, going=one.ranks, why_going=one.reason
                )
            case ExchangeAfter():
                verdict, after = replace(verdict, opening=one.blocking), one
    return verdict, after


def joined(first: Verdict, then: Verdict) -> Verdict:
    """Return one verdict for two decisions that take effect at the same step."""
    return replace(
        then,
        shares=first.shares if then.shares is None else then.shares,
        batch=first.batch if then.batch is None else then.batch,
        reason=f"{first.reason}; {then.reason}",
    )
