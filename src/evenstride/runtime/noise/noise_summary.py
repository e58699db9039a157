"""What a run's measured steps told of the noise of its gradient, in numbers and as a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from evenstride.core.gradients.noise_accumulator import NoiseOfRun
from evenstride.runtime.noise.noise_meter import NoiseMeter


@dataclass(frozen=True, slots=True)
class NoiseSummary:
    """The noise of the gradient, of late; figures are ``None`` until a step has been measured.

    Args:
        every: steps from one measured step to the next.
        steps: measured by all ranks that had samples.
        scale: noise over signal, in units: the batch at which the two are as large as each other;
            ``None`` also where no signal is found in the noise.
        scale_low: lower end of its 95 % interval.
        scale_high: upper end; ``None`` if the steps do not bound it.
        noise: trace of the covariance of one unit's gradient.
        signal: squared norm of the gradient itself.
        gain: mean squared norm of the parts over that of their mean: from 1 to their number.
        unit: ``samples``, or ``weights`` where batches are weighed otherwise (by tokens, say).
        why: why there are no figures; empty if there are.
    """

    every: int
    steps: int = 0
    scale: float | None = None
    scale_low: float | None = None
    scale_high: float | None = None
    noise: float | None = None
    signal: float | None = None
    gain: float | None = None
    unit: str = "samples"
    why: str = ""

    def __str__(self) -> str:
        if self.scale_low is None:
            return f"gradient noise was not measured: {self.why}"
        steps = f"from {self.steps} measured step(s)"
        if self.scale is None:
            return (
                f"gradient noise: so large that the gradient is not told from it, a scale of at "
                f"least {self.scale_low:.3g} {self.unit} (95 %), {steps}"
            )
        low, high = f"{self.scale_low:.3g}", self.scale_high
        between = f"at least {low}" if high is None else f"{low} to {high:.3g}"
        gain = "" if self.gain is None else f"gain {self.gain:.2f}, "
        return (
            f"gradient noise: a scale of {self.scale:.3g} {self.unit} (95 %: {between}), "
            f"{gain}{steps}"
        )


def noise_summary(known: NoiseOfRun | None, meter: NoiseMeter | None) -> NoiseSummary | None:
    """Return what is known of the noise; ``None`` if it was not asked for.

    Args:
        known: by the leader; ``None`` on other ranks.
        meter: of this rank; ``None`` if it does not measure.
    """
    if meter is None:
        return None
    unit = "weights" if meter.weighted else "samples"
    if known is None:
        why = "this rank knows only its own part; rank 0's summary is complete"
        return NoiseSummary(meter.every, unit=unit, why=why)
    if not known.steps:
        why = meter.why or f"no measured step is complete yet; one in {meter.every} is measured"
        return NoiseSummary(meter.every, unit=unit, why=why)
    estimate, scale = known.estimate, known.estimate.scale()
    return NoiseSummary(
        every=meter.every,
        steps=known.steps,
        scale=_finite(scale.value),
        scale_low=scale.low,
        scale_high=_finite(scale.high),
        noise=estimate.noise,
        signal=estimate.signal,
        gain=_finite(estimate.gain),
        unit=unit,
    )


def _finite(value: float) -> float | None:
    """Return a number that JSON knows."""
    return value if isfinite(value) else None
