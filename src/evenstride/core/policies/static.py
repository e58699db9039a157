"""A split set once: equal, by declared resources, or given outright.

Source:
    The open loop of Dynamic Batching (Tyagi & Sharma, ACSOS 2020, arXiv 2305.12213):
    ``b_k = B X_k / sum X`` with ``X`` the number of cores on CPU clusters and the peak
    half-precision FLOP/s where GPUs take part. We measure a matrix product instead of reading
    data sheets, in the dtype in use: that of autocast if `Stride` is created inside it, else
    torch's default. Bounds hold; rounding is by largest remainder.

How we differ:
    * The resource is named in the policy: ``static`` is FLOP/s on CPU clusters too, and
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
    """Equal shares, apart from a remainder and from bounds: what every mainstream stack does."""

    # There is nothing to find out.
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
        """Return the split by the resource; `ConfigError` if that of some worker is not known."""
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
        """Raise `ConfigError` unless there is a share for each worker."""
        if len(self.shares) != workers:
            raise ConfigError(
                f"policy static gives {len(self.shares)} shares, but there are {workers} "
                "workers; give one share per worker, in rank order"
            )

    def init(self, fleet: Fleet) -> tuple[None, Move]:
        """Return the given split; `ConfigError` if it fits not batch, workers and bounds."""
        self.check_workers(len(fleet))
        if sum(self.shares) != fleet.global_batch:
            raise ConfigError(
                f"policy static gives shares that sum to {sum(self.shares)}, but the global "
                f"batch is {fleet.global_batch}; change one or the other"
            )
        for share, worker, low, high in zip(
            self.shares, fleet.workers, fleet.lower, fleet.upper, strict=True
        ):
            # A share of 0 is a deliberate choice that bounds do not speak about: the worker
            # then trains on nothing and only takes part in the collectives.
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
    """Return what is wrong where some worker has none of a resource, and what would do."""
    name, field, other = (
        ("static:cores", "", "static:flops")
        if resource == "cores"
        else ("static, that is static:flops,", " (flops_per_s)", "static:cores")
    )
    without = fleet.workers[known_of(resource, fleet).index(None)].name
    instead: Resource = "flops" if resource == "cores" else "cores"
    served = f"{other} (known of all), " if None not in known_of(instead, fleet) else ""
    return (
        f"policy {name} needs the {resource} of every worker{field}, and worker {without} has "
        f"none; use {served}static:A,B,... with the shares themselves, or policy adaptive"
    )
