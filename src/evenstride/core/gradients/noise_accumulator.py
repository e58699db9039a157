"""What workers tell of the gradients of measured steps, put together step by step.

Each worker tells of its own part of a step, when it comes to it: parts of one step may come in
different exchanges, in any order, or never where a worker is lost. A step is whole when the parts
that were told weigh as much as its batch, so nobody has to know who had samples in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isclose

from evenstride.core.gradients.noise_scale import GradientNorms, NoiseEstimate

# Sums of weights that are no whole numbers, and norms of equal gradients on devices of other kinds.
_ROUNDING, _ALIKE = 1e-9, 1e-6

# Steps that may be incomplete at a time. Ranks are never far apart, so what is older was lost.
_MOST_OPEN = 64


@dataclass(frozen=True, slots=True)
class StepParts:
    """One or more parts of a measured step, as a worker tells of them."""

    step: int  # its number
    parts: int  # how many
    weight: float  # of these parts, in samples (or whatever the loss is a mean over), above 0
    batch: float  # ``B``, of all parts of the step
    local: float  # sum of their squared norms times their weights, ``sum b_k |g_k|^2``
    mean: float  # ``T``, squared norm of the step's own gradient, as this worker sees it
    # Sum of their mean losses times their weights; ``None`` if one is not known.
    loss: float | None = None

    @property
    def norms(self) -> GradientNorms:
        """What the step tells of its noise, if these are all of its parts."""
        return GradientNorms(self.parts, self.batch, self.local / self.weight, self.mean)

    @property
    def whole(self) -> bool:
        """Whether these are all parts of the step."""
        return isclose(self.weight, self.batch, rel_tol=_ROUNDING)

    @property
    def mean_loss(self) -> float | None:
        """The loss over these parts; ``None`` if that of one is not known."""
        return None if self.loss is None else self.loss / self.weight

    def joined(self, other: StepParts) -> StepParts | None:
        """Return the parts of both; ``None`` if they cannot be of one step."""
        weight = self.weight + other.weight
        alike = self.step == other.step and self.batch == other.batch
        # All ranks have the same gradient after its reduction, so another norm is another step.
        if not alike or not isclose(self.mean, other.mean, rel_tol=_ALIKE):
            return None
        if weight > self.batch * (1 + _ROUNDING):
            return None
        return StepParts(
            self.step,
            self.parts + other.parts,
            weight,
            self.batch,
            self.local + other.local,
            self.mean,
            None if self.loss is None or other.loss is None else self.loss + other.loss,
        )


@dataclass(frozen=True, slots=True)
class NoiseOfRun:
    """What a run's measured steps have told of the noise of its gradient so far."""

    estimate: NoiseEstimate = field(default_factory=NoiseEstimate)  # from the steps that are whole
    steps: int = 0  # how many these are
    # Steps of which parts are still to come, by number; those that never become whole make way for
    # later ones.
    open: tuple[StepParts, ...] = ()

    def hear(self, told: Iterable[StepParts]) -> tuple[NoiseOfRun, tuple[StepParts, ...]]:
        """Return what is known with more parts, and the steps that have become whole.

        A step of one part tells nothing and is left out. Parts that cannot be of one step under
        the same number are of different steps: the later ones are kept.
        """
        pending, whole = {parts.step: parts for parts in self.open}, list[StepParts]()
        for parts in told:
            before = pending.pop(parts.step, None)
            both = parts if before is None else before.joined(parts) or parts
            if not both.whole:
                pending[parts.step] = both
            elif both.norms.tells:
                whole.append(both)
        # Older steps weigh less, so the estimate must get them in order, however they came.
        whole.sort(key=lambda parts: parts.step)
        estimate = self.estimate
        for parts in whole:
            estimate = estimate.after(parts.norms)
        # Only now: in a long exchange more steps than these may be open until it is put together.
        kept = sorted(pending.values(), key=lambda parts: parts.step)[-_MOST_OPEN:]
        return NoiseOfRun(estimate, self.steps + len(whole), tuple(kept)), tuple(whole)
