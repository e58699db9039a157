"""Replies and verdicts as text."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple
from typing import Any

from evenstride.core.caps import Held
from evenstride.core.gradient_parts import StepParts
from evenstride.runtime.desk import Told
from evenstride.runtime.messages import Reply, Verdict
from evenstride.runtime.turn import Turn
from evenstride.trace.codec import decode_observation, dumps, encode_observation


def reply_to_text(reply: Reply) -> str:
    """Return a reply as one line of JSON."""
    return dumps(
        {
            "barrier": reply.barrier,
            "checksum": reply.checksum,
            "stands": reply.stands,
            "observations": [encode_observation(seen) for seen in reply.observations],
            "leaving": reply.leaving,
            "held": None if reply.held is None else asdict(reply.held),
            "notice": None if reply.notice is None else asdict(reply.notice),
            "norms": [astuple(parts) for parts in reply.norms],
            "drawn": reply.drawn,
            "turn": None if reply.turn is None else asdict(reply.turn),
        }
    )


def reply_from_text(text: str) -> Reply:
    """Return the reply that `reply_to_text` wrote."""
    plain = json.loads(text)
    return Reply(
        plain["barrier"],
        plain["checksum"],
        tuple(tuple(stand) for stand in plain["stands"]),
        tuple(decode_observation(seen) for seen in plain["observations"]),
        plain["leaving"],
        None if plain["held"] is None else Held(**plain["held"]),
        None if plain["notice"] is None else Told(**plain["notice"]),
        tuple(StepParts(*parts) for parts in plain["norms"]),
        plain["drawn"],
        None if plain["turn"] is None else Turn(**plain["turn"]),
    )


def verdict_to_plain(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON types."""
    return asdict(verdict)


def verdict_from_plain(plain: dict[str, Any]) -> Verdict:
    """Return the verdict that `verdict_to_plain` wrote."""
    shares = plain["shares"]
    tuples = {name: tuple(plain[name]) for name in ("expected_s", "band", "going")}
    return Verdict(**{**plain, **tuples, "shares": None if shares is None else tuple(shares)})
