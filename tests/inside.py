"""Access to the internals of a `Stride`, for tests of one part in a whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import evenstride

if TYPE_CHECKING:
    from evenstride.runtime.rank_session import RankSession


def session(stride: evenstride.Stride) -> RankSession:
    """Return the internals of a stride on this rank. Only this function reads the private name."""
    return stride._session
