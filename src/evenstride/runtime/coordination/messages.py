"""What a rank tells the leader in an exchange, and what the leader tells all ranks.

`Reply` and `Verdict` travel as JSON text.
"""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import numpy as np

from evenstride.core.allocation.memory_model import PeakMemory
from evenstride.core.control.events import Verdict
from evenstride.core.fleet import FloatArray
from evenstride.core.gradients.noise_accumulator import StepParts
from evenstride.core.time_model.observation import Measurements
from evenstride.runtime.coordination.notice_filter import RankNotices


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank's training thread stands.

    Args:
        step: steps it has committed.
        stands: (step, epoch, position) where its latest passes over the loader began.
        committed_s: when the latest step was committed (`time.perf_counter`); ``None`` if none was,
            or it is not known.
        epoch: of the data that the next step belongs to; ``None`` if it is not known.
    """

    step: int
    stands: tuple[tuple[int, int, int], ...]
    committed_s: float | None = None
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class BatchChange:
    """What a rank reports at the end of an epoch, or before a pass over restored data.

    Args:
        step: the first step after it.
        wanted: batch that it has restored, and needs; ``None`` to have one chosen.
        most: largest batch of which there is one in an epoch.
        weighted: whether the noise it measures is not in samples.
    """

    step: int
    wanted: int | None
    most: int
    weighted: bool = False


def reply_to_text(reply: Reply) -> str:
    """Return a reply as one line of JSON."""
    return json.dumps(
        {
            "barrier": reply.barrier,
            "checksum": reply.checksum,
            "stands": reply.stands,
            "observations": _columns(reply.observations),
            "leaving": reply.leaving,
            "held": None if reply.held is None else asdict(reply.held),
            "notice": None if reply.notice is None else asdict(reply.notice),
            "norms": [astuple(parts) for parts in reply.norms],
            "drawn": reply.drawn,
            "turn": None if reply.turn is None else asdict(reply.turn),
        },
        separators=(",", ":"),
        allow_nan=False,  # other readers of JSON than Python's know no NaN
    )


def reply_from_text(text: str) -> Reply:
    """Return the reply that `reply_to_text` wrote."""
    plain = json.loads(text)
    return Reply(
        plain["barrier"],
        plain["checksum"],
        tuple(tuple(stand) for stand in plain["stands"]),
        _from_columns(plain["observations"]),
        plain["leaving"],
        None if plain["held"] is None else PeakMemory(**plain["held"]),
        None if plain["notice"] is None else RankNotices(**plain["notice"]),
        tuple(StepParts(*parts) for parts in plain["norms"]),
        plain["drawn"],
        None if plain["turn"] is None else BatchChange(**plain["turn"]),
    )


def _columns(told: Measurements) -> dict[str, Any]:
    """Return the columns as lists; a time or load that is no finite number becomes ``None``."""
    return {
        "worker": told.worker.tolist(),
        "share": told.share.tolist(),
        "first_step": told.first_step.tolist(),
        "steps": told.steps.tolist(),
        "busy_s": _finite(told.busy_s),
        "wait_s": _finite(told.wait_s),
        "sums_s": _finite(told.sums_s),
        "modelled": told.modelled.tolist(),
        "loads": _finite(told.loads),
    }


def _finite(values: FloatArray) -> list[Any]:
    # JSON knows neither nan nor infinity; as an array of objects it can hold `None` instead.
    known = values.astype(object)
    known[~np.isfinite(values)] = None
    return list(known.tolist())


def _from_columns(plain: dict[str, Any]) -> Measurements:
    """Return the columns again; what was no finite number is not a number now."""
    n = len(plain["worker"])
    return Measurements(
        worker=np.array(plain["worker"], dtype=np.int64),
        share=np.array(plain["share"], dtype=np.int64),
        first_step=np.array(plain["first_step"], dtype=np.int64),
        steps=np.array(plain["steps"], dtype=np.int64),
        busy_s=np.array(plain["busy_s"], dtype=np.float64),
        wait_s=np.array(plain["wait_s"], dtype=np.float64),
        sums_s=np.array(plain["sums_s"], dtype=np.float64).reshape(3, n),
        modelled=np.array(plain["modelled"], dtype=np.bool_),
        loads=np.array(plain["loads"], dtype=np.float64).reshape(2, n),
    )


def verdict_to_plain(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON types."""
    return asdict(verdict)


def verdict_from_plain(plain: dict[str, Any]) -> Verdict:
    """Return the verdict that `verdict_to_plain` wrote."""
    shares = plain["shares"]
    tuples = {name: tuple(plain[name]) for name in ("expected_s", "band", "going")}
    return Verdict(**{**plain, **tuples, "shares": None if shares is None else tuple(shares)})


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
    observations: Measurements
    leaving: bool = False
    held: PeakMemory | None = None
    notice: RankNotices | None = None
    norms: tuple[StepParts, ...] = ()
    drawn: int = 0
    turn: BatchChange | None = None


def joined(first: Verdict, then: Verdict) -> Verdict:
    """Return one verdict for two decisions that take effect at the same step."""
    return replace(
        then,
        shares=first.shares if then.shares is None else then.shares,
        batch=first.batch if then.batch is None else then.batch,
        reason=f"{first.reason}; {then.reason}",
    )
