"""How many epochs a training takes at a batch, from whatever is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

from evenstride.core.convergence import Convergence, Trained, fit_best
from evenstride.core.gradient_noise import Interval
from evenstride.errors import ConfigError
from evenstride.planner.workload import Noise, Profile

_ASSUMED = 1.25  # by which one training may differ from a law that goes through all of them


class Epochs(Protocol):
    """Epochs by batch."""

    @property
    def why(self) -> str:
        """One sentence on where they come from."""
        ...

    def at(self, batch: int) -> Interval | None:
        """Return the epochs at a batch with a 95 % interval; ``None`` if nothing is known."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """From trainings that reached the target, at two batches or more.

    Args:
        convergence: fitted to them.
        batches: at how many.
    """

    convergence: Convergence
    batches: int

    @property
    def why(self) -> str:
        """One sentence on where they come from."""
        law = f"the {self.convergence.law} law"
        unsure = "" if self._scatter_known else ", too few to tell their scatter: 25 % is assumed"
        return f"epochs by {law}, fitted to trainings at {self.batches} batches{unsure}"

    @property
    def _scatter_known(self) -> bool:
        return self.convergence.epochs_by.freedom > 0

    def at(self, batch: int) -> Interval | None:
        """Return the epochs at a batch between those that were trained; ``None`` elsewhere."""
        if not self.convergence.smallest <= batch <= self.convergence.largest:
            return None
        found = self.convergence.epochs(batch)
        if self._scatter_known:
            return found
        return Interval(found.value, found.value / _ASSUMED, found.value * _ASSUMED)


@dataclass(frozen=True, slots=True)
class ByNoise:
    """From the epochs at one batch, and the noise scale of the gradient there.

    ``e(B) = e(B0) (phi + B) / (phi + B0)``: the law of large batches, with the learning rate well
    set at every batch. The interval is that of the noise scale alone.

    Args:
        epochs: at the base.
        base: ``B0`` in samples.
        noise: ``phi``.
    """

    epochs: float
    base: int
    noise: Noise

    @property
    def why(self) -> str:
        """One sentence on where they come from."""
        return (
            f"{self.epochs:g} epochs at a batch of {self.base}, at others by the gradient's noise "
            f"scale of {self.noise.scale:.0f} samples"
        )

    def at(self, batch: int) -> Interval | None:
        """Return the epochs at a batch."""
        ends = [self.noise.low, inf if self.noise.high is None else self.noise.high]
        low, high = sorted(self._of(end, batch) for end in ends)
        return Interval(self._of(self.noise.scale, batch), low, high)

    def _of(self, phi: float, batch: int) -> float:
        return self.epochs if phi == inf else self.epochs * (phi + batch) / (phi + self.base)


@dataclass(frozen=True, slots=True)
class Given:
    """As the user says, for one batch only: what another needs is not known.

    Args:
        epochs: at the batch.
        batch: in samples.
    """

    epochs: float
    batch: int

    @property
    def why(self) -> str:
        """One sentence on where they come from."""
        return (
            f"{self.epochs:g} epochs at a batch of {self.batch}; what other batches need is not "
            "known"
        )

    def at(self, batch: int) -> Interval | None:
        """Return the epochs at the batch, ``None`` at any other."""
        return Interval(self.epochs, self.epochs, self.epochs) if batch == self.batch else None


def epochs_of(profile: Profile, epochs: float | None) -> Epochs:
    """Return the epochs of a workload.

    Args:
        profile: of the workload.
        epochs: that the user gives for the profile's own batch; ``None`` for those measured.

    Raises:
        ConfigError: nothing is known, or the number is not above 0.
    """
    if epochs is not None:
        if not 0 < epochs < inf:
            raise ConfigError(f"--epochs is {epochs}; it must be above 0, such as 10")
        base = profile.global_batch
        return ByNoise(epochs, base, profile.noise) if profile.noise else Given(epochs, base)
    runs = [Trained(one.batch, one.epochs, one.gamma) for one in profile.trainings]
    batches = {run.batch for run in runs}
    if not batches:
        raise ConfigError(
            "how long training lasts is not known: no run has reached a target; give --epochs, or "
            "profiles of runs that did"
        )
    if len(batches) > 1:
        return Measured(fit_best(runs), len(batches))
    mean = sum(run.epochs for run in runs) / len(runs)
    only = runs[0].batch
    return ByNoise(mean, only, profile.noise) if profile.noise else Given(mean, only)
