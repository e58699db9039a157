"""Splits for a fleet of which nothing has been measured: equal, or by declared resources."""

from __future__ import annotations

from typing import Literal

import numpy as np

from evenstride.core.allocation.proportional_split import apportion
from evenstride.core.arrays import Shares
from evenstride.core.fleet import Fleet, as_shares

Resource = Literal["flops", "cores"]


def equal_split(fleet: Fleet) -> Shares:
    """Return equal shares, apart from a remainder and from bounds."""
    equal = apportion(np.ones(len(fleet)), fleet.global_batch, fleet.lower, fleet.upper)
    return as_shares(equal)


def split_by(resource: Resource, fleet: Fleet) -> Shares | None:
    """Return the split in proportion to a resource, or ``None`` if it is not known for all."""
    weights = [v for v in known_of(resource, fleet) if v is not None]
    if len(weights) < len(fleet):
        return None
    return as_shares(apportion(np.array(weights), fleet.global_batch, fleet.lower, fleet.upper))


def known_of(resource: Resource, fleet: Fleet) -> list[float | None]:
    """Return the resource of each worker, ``None`` where it cannot be used."""
    values = [w.cores if resource == "cores" else w.flops_per_s for w in fleet.workers]
    return [v if v is not None and v > 0 else None for v in values]
