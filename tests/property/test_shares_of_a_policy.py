"""Shares that a user's policy may return: 0, or at least the worker's ``min_share``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from evenstride.core.control.advance import advance
from evenstride.core.control.events import Event, Exchanged, FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Fleet, Shares
from evenstride.core.policy import Move, Situation
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import ConfigError
from tests.contract.fleets import fleets, splits


@dataclass(frozen=True)
class Returning:
    """A policy that returns given shares: first as the opening, then as its decision."""

    first: Shares
    later: Shares
    opening_steps: int = 0

    def init(self, fleet: Fleet) -> tuple[None, Move]:  # noqa: ARG002
        return None, Move(self.first, "first")

    def decide(self, state: None, situation: Situation) -> tuple[None, Move]:  # noqa: ARG002
        return None, Move(self.later, "later")


@st.composite
def _parts(draw: st.DrawFn, fleet: Fleet) -> Shares:
    """Return any shares that sum to the global batch, or some within the bounds."""
    cut = st.integers(0, fleet.global_batch)
    cuts = sorted(draw(st.lists(cut, min_size=len(fleet) - 1, max_size=len(fleet) - 1)))
    ends = (0, *cuts, fleet.global_batch)
    anyhow = tuple(end - start for start, end in pairwise(ends))
    return draw(st.just(anyhow) | splits(fleet))


def _too_small(shares: Shares, fleet: Fleet) -> list[tuple[int, str]]:
    return [
        (share, worker.name)
        for share, worker in zip(shares, fleet.workers, strict=True)
        if 0 < share < worker.min_share
    ]


def _check_bounds(shares: Shares, fleet: Fleet) -> None:
    assert sum(shares) == fleet.global_batch
    for share, low, high in zip(shares, fleet.lower, fleet.upper, strict=True):
        assert share == 0 or low <= share <= high


@given(st.data())
def test_a_share_below_min_share_is_refused_and_every_other_one_is_kept_in_bounds(
    data: st.DataObject,
) -> None:
    fleet = data.draw(fleets())
    good, shares = data.draw(splits(fleet)), data.draw(_parts(fleet))
    formed = FleetFormed(0, 0, fleet.global_batch, fleet.workers)
    seen = [Observation(k, share, 1, (0.1,), (0.0,)) for k, share in enumerate(good)]
    exchanged = Exchanged(4, 5, Measurements.of(seen))
    control, _ = advance(Control(Returning(good, shares)), formed)
    # A group that forms again may get its shares from `decide`.
    again = FleetFormed(1, 4, fleet.global_batch, fleet.workers)
    measured, _ = advance(advance(Control(Returning(good, good)), formed)[0], exchanged)
    ways: list[tuple[Control, Event]] = [
        (Control(Returning(shares, good)), formed),
        (control, exchanged),
        (replace(measured, policy=Returning(good, shares)), again),
    ]

    small = _too_small(shares, fleet)

    event("refused" if small else "accepted")
    for before, happening in ways:
        if small:
            with pytest.raises(ConfigError) as refused:
                advance(before, happening)
            message = str(refused.value)
            assert "Returning" in message
            assert f"a share of {small[0][0]} for worker {small[0][1]}" in message
        else:
            _check_bounds(advance(before, happening)[0].shares, fleet)
