"""The parts behind a `Stride`, for tests that look at one of them in a whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import evenstride

if TYPE_CHECKING:
    from evenstride.runtime.rank_session import RankSession


def session(stride: evenstride.Stride) -> RankSession:
    """Return what a stride has put together on this rank: the one place that knows where it is."""
    return stride._session
