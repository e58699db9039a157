"""A split that never changes: equal, by declared resources, or given.

Source:
    The open loop of Dynamic Batching (Tyagi & Sharma, ACSOS 2020, arXiv 2305.12213):
    ``b_k = B X_k / sum X`` with ``X`` the number of cores on CPU clusters and the peak
    half-precision FLOP/s on clusters with GPUs. We measure a matrix product instead of reading
    data sheets, in the dtype in use: that of autocast if `Stride` is created inside it, otherwise
    torch's default. Bounds hold; rounding is by largest remainder.

How we differ:
    * The policy names the resource: ``static`` is FLOP/s on CPU clusters too, and
      ``static:cores`` is the paper's rule for them. `dynamic-batching` chooses as the paper does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from evenstride.core.allocation.speedup import Resource, equal_split, known_of, split_by
from evenstride.core.arrays import Shares
from evenstride.core.fleet import Fleet
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Uniform:
    """Equal shares, except for a remainder and for bounds, as in plain DDP."""

    # No search is needed.
    opening_steps: ClassVar[int] = 0

    def init(self, fleet: Fleet) -> tuple[None, Move]:
        return None, Move(equal_split(fleet), "equal split")

    def decide(self, state: None, situation: Situation) -> tuple[None, Decision]:
        del state, situation
        return None, Keep("the equal split is fixed")


@dataclass(frozen=True, slots=True)
class Static:
    """In proportion to a resource of the workers, decided at the start and kept."""

    by: Resource = "flops"

    # The split never changes.
    opening_steps: ClassVar[int] = 0

    def init(self, fleet: Fleet) -> tuple[None, Move]:
        """Return the split by the resource; `ConfigError` if a worker's is not known."""
        shares = split_by(self.by, fleet)
        if shares is None:
            raise ConfigError(_not_known(self.by, fleet))
        return None, Move(shares, f"split by {self.by}")

    def decide(self, state: None, situation: Situation) -> tuple[None, Decision]:
        del state, situation
        return None, Keep(f"the split by {self.by} is fixed")


@dataclass(frozen=True, slots=True)
class GivenShares:
    """Exactly these shares."""

    shares: Shares

    # The split never changes.
    opening_steps: ClassVar[int] = 0

    def check_workers(self, workers: int) -> None:
        """Raise `ConfigError` unless each worker has a share."""
        if len(self.shares) != workers:
            raise ConfigError(
                f"policy static has {len(self.shares)} shares, but the run has {workers} workers; "
                "give one share per worker, in rank order"
            )

    def init(self, fleet: Fleet) -> tuple[None, Move]:
        """Return the given split; `ConfigError` if it does not match batch, workers and bounds."""
        self.check_workers(len(fleet))
        if sum(self.shares) != fleet.global_batch:
            raise ConfigError(
                f"policy static has shares that sum to {sum(self.shares)}, but the global batch "
                f"is {fleet.global_batch}; change one of them"
            )
        for share, worker, low, high in zip(
            self.shares, fleet.workers, fleet.lower, fleet.upper, strict=True
        ):
            # A share of 0 is a deliberate choice to which bounds do not apply: the worker
            # trains nothing and only takes part in the collectives.
            if share and not low <= share <= high:
                raise ConfigError(
                    f"policy static gives worker {worker.name} {share} samples, outside its "
                    f"bounds of {low} to {high}; change the share or the bounds"
                )
        return None, Move(self.shares, "given split")

    def decide(self, state: None, situation: Situation) -> tuple[None, Decision]:
        del state, situation
        return None, Keep("the given split is fixed")


def is_fixed(policy: object) -> bool:
    """Return whether a policy never uses measured times."""
    return isinstance(policy, Uniform | Static | GivenShares)


def _not_known(resource: Resource, fleet: Fleet) -> str:
    """Return the message for a worker without a known resource, with alternatives."""
    name, field, other = (
        ("static:cores", "", "static:flops")
        if resource == "cores"
        else ("static, that is static:flops,", " (flops_per_s)", "static:cores")
    )
    without = fleet.workers[known_of(resource, fleet).index(None)].name
    instead: Resource = "flops" if resource == "cores" else "cores"
    served = f"{other} (known for all), " if None not in known_of(instead, fleet) else ""
    return (
        f"policy {name} needs the {resource} of every worker{field}, but that of worker {without} "
        f"is not known; use {served}static:A,B,... with the shares, or policy adaptive"
    )
