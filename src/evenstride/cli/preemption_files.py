"""``--preemptions FILE[:TYPE]`` of ``evenstride plan``: losses that were recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evenstride.errors import ConfigError
from evenstride.planner.search.candidates import Kind
from evenstride.planner.spot.spot_recordings import recorded_transience, with_recorded


def with_preemptions(
    kinds: Sequence[Kind], recordings: Sequence[str], *, spot: bool
) -> tuple[Kind, ...]:
    """Return kinds of machines with the losses that were recorded of them.

    Args:
        kinds: that may be rented.
        recordings: files, each with a type after a colon, or without one for all other types.
        spot: whether spot machines are planned with.

    Raises:
        ConfigError: a file cannot be used, or it is not clear what for.
    """
    if recordings and not spot:
        raise ConfigError("--preemptions tells of spot machines; give --spot as well")
    known = {}
    for one in recordings:
        path, name = _parted(one)
        if name in known:
            what = f"of {name}" if name else "of all types"
            raise ConfigError(f"losses {what} are given twice; give one --preemptions for a type")
        known[name] = recorded_transience(path)
    return with_recorded(kinds, known) if known else tuple(kinds)


def _parted(text: str) -> tuple[Path, str]:
    """Return file and type; what is there as a file is no type."""
    path, colon, name = text.rpartition(":")
    if not colon or not path or Path(text).exists():
        return Path(text), ""
    return Path(path), name
