"""The settings of a `Stride`: its arguments, completed from the environment.

``Stride(global_batch="auto", bounds=(64, 1024))`` leaves the global batch open.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from evenstride.core.diagnostics.alerts import USUAL_BELOW
from evenstride.core.policies import is_policy, policy_from_spec, spec_of
from evenstride.core.policy import Policy, follows_epochs
from evenstride.core.sync_modes.mode_specs import AllReduce, Mode, SyncMode, sync_from_spec
from evenstride.errors import ConfigError
from evenstride.runtime.environment import Environment
from evenstride.runtime.noise.noise_meter import check_mode
from evenstride.runtime.usage_errors import check_whole, whole

AUTO = "auto"


USUAL_EVERY = 10
"""Steps between two measurements of the gradient noise, if the global batch is chosen from it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The global batch of a process."""

    samples: int  # per step; in the first epoch, if the global batch is chosen during the run
    # The global batches that a restored run may have had before; `None` if it must be the same.
    bounds: tuple[int, int] | None = None
    chosen: bool = False  # whether a new one is chosen at the end of each epoch


def batch_of(
    asked: int | str,
    bounds: tuple[int, int] | None,
    environment: int | None,
    *,
    averages: bool = True,
) -> Batch:
    """Return the global batch that a `Stride` trains with.

    For ``auto``, ``EVENSTRIDE_GLOBAL_BATCH`` fixes the batch from one start to the next, if it is
    set. Otherwise the batch begins with the lower bound and is chosen at the end of each epoch. In
    a mode in which the engine does not average gradients, it is not chosen. The batch then stays
    the lower bound, and a state with another batch is refused.

    Args:
        asked: samples, or ``auto``.
        bounds: smallest and largest global batch, with ``auto``.
        environment: ``EVENSTRIDE_GLOBAL_BATCH``; ``None`` if unset, 0 for the lower bound.
        averages: whether the synchronisation mode averages the gradients of each step.
    """
    if not isinstance(asked, str) or asked != AUTO:
        if bounds is not None:
            raise ConfigError(
                f"bounds={bounds!r} apply to an open global batch only; give them with "
                f'global_batch="auto", or leave them out and keep global_batch={asked!r}'
            )
        return Batch(whole(asked))
    low, high = _checked(bounds)
    if environment is None:
        return Batch(low, (low, high), chosen=True) if averages else Batch(low)
    environment = environment or low
    if not low <= environment <= high:
        raise ConfigError(
            f"EVENSTRIDE_GLOBAL_BATCH is {environment}, which is not within the bounds of this "
            f"Stride, {low} to {high}; set it to a number between them, or widen bounds="
        )
    return Batch(environment, (low, high))


def _checked(bounds: tuple[int, int] | None) -> tuple[int, int]:
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ConfigError(
            f'global_batch="auto" needs bounds, but bounds is {bounds!r}; give the smallest and '
            "the largest global batch that may be chosen, such as bounds=(64, 1024)"
        )
    low, high = map(whole, bounds)
    check_whole("the lower of bounds", low, least=1)
    check_whole("the upper of bounds", high, least=low)
    return low, high


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a `Stride`: its arguments, completed from the environment."""

    global_batch: int  # samples per step, over all workers.
    seed: int  # for the sample order and the randomness of the samples.
    policy: str
    min_share: int  # smallest share of this rank in a full step.
    max_share: int | None  # largest share of this rank; `None` for no limit.
    quantum: int | None  # that its shares are multiples of; `None` to find it.
    memory_fraction: float | None  # of the memory, that a share may fill; `None` for no limit.
    trace: Path | None  # where the leader writes the trace; `None` for no trace.
    # Steps after which the pass over the loader ends; the next pass ends the program.
    max_steps: int | None
    step_file: Path | None = None  # where the leader keeps its step count; `None` for no file.
    sync: str = "bsp"
    # Steps between two measurements of the gradient noise; 0 for none.
    noise_every: int = 0
    # Smallest and largest global batch; `None` if it cannot change.
    bounds: tuple[int, int] | None = None
    chosen: bool = False  # whether it changes when an epoch ends; else at a restart only.
    # Where the leader writes metrics; see `evenstride.runtime.sinks.sink_settings`.
    sinks: tuple[Any, ...] = ()
    # Fraction of its best speed below which the log names a worker; 0 for never.
    alert_below: float = USUAL_BELOW
    engine: str = "auto"  # `none` if the script averages the gradients itself.
    policy_given: bool = False  # whether script or environment name the policy.
    # The policy, if the script gave an object; `None` for a specification.
    own_policy: Policy[Any] | None = None

    @property
    def decides(self) -> Policy[Any]:
        """The policy that sets the shares; `ConfigError` if its specification is invalid."""
        return policy_from_spec(self.policy) if self.own_policy is None else self.own_policy

    @property
    def mode(self) -> SyncMode:
        """The synchronisation mode; `ConfigError` if its specification is invalid."""
        if not isinstance(self.sync, str):
            raise ConfigError(
                f"sync is {self.sync!r}; it must name a mode, such as 'bsp' or 'bsp-ps(servers=2)'"
            )
        return sync_from_spec(self.sync)

    @property
    def meets(self) -> bool:
        """Whether all ranks meet at the end of each epoch, for a decision."""
        return self.chosen or (follows_epochs(self.decides) and self.mode.lockstep)


class StrideArguments(TypedDict):
    """The arguments of a `Stride` that become settings; ``None`` leaves one to the environment."""

    seed: Any
    policy: str | Policy[Any] | None
    sync: str | SyncMode | None
    min_share: Any
    max_share: Any
    quantum: Any
    memory_fraction: float | None
    trace: str | os.PathLike[str] | None
    noise_every: Any
    sinks: Any
    alert_below: float | None
    engine: Any


def settings_of(
    environment: Environment, batch: Batch, **asked: Unpack[StrideArguments]
) -> Settings:
    """Return the settings: an argument takes precedence over the environment, then the default.

    Sinks have been checked already. `check` checks the rest, together with the other ranks.
    """
    max_share, trace = asked["max_share"], asked["trace"]
    policy: Any = asked["policy"] or environment.policy or "adaptive"
    alert_below = asked["alert_below"]
    if alert_below is None:
        alert_below = environment.alert_below
    return Settings(
        global_batch=batch.samples,
        bounds=batch.bounds,
        chosen=batch.chosen,
        seed=whole(asked["seed"]),
        policy=_spec_of(policy),
        own_policy=policy if is_policy(policy) else None,
        policy_given=bool(asked["policy"] or environment.policy),
        min_share=whole(asked["min_share"]),
        max_share=None if max_share is None else whole(max_share),
        quantum=None if asked["quantum"] is None else whole(asked["quantum"]),
        memory_fraction=asked["memory_fraction"],
        trace=environment.trace if trace is None else Path(trace),
        max_steps=environment.max_steps,
        step_file=environment.progress,
        sync=_text_of(asked["sync"]) or environment.sync or "bsp",
        noise_every=whole(_noise_every(asked["noise_every"], environment, batch)),
        sinks=asked["sinks"],
        alert_below=USUAL_BELOW if alert_below is None else alert_below,
        engine=asked["engine"],
    )


def _spec_of(policy: Any) -> Any:
    return spec_of(policy) if is_policy(policy) else policy


def _text_of(sync: Any) -> Any:
    return str(sync) if isinstance(sync, Mode) else sync


def averages(sync: object) -> bool:
    """Return whether the engine averages gradients in a mode; unknown modes count as averaging."""
    sync = _text_of(sync)
    try:
        return not isinstance(sync, str) or isinstance(sync_from_spec(sync), AllReduce)
    except ConfigError:  # reported when the settings are checked, with the other ranks
        return True


def _noise_every(asked: Any, environment: Environment, batch: Batch) -> Any:
    if asked is not None:
        return asked
    if environment.noise_every is not None:
        return environment.noise_every
    return USUAL_EVERY if batch.chosen else 0


def check(settings: Settings) -> None:
    """Raise a `ConfigError` for settings that are invalid for any set of ranks."""
    check_whole("global_batch", settings.global_batch, least=1)
    check_whole("seed", settings.seed)
    check_whole("noise_every", settings.noise_every, least=0)
    check_mode(settings.noise_every, settings.mode)
    _check_fraction(settings.memory_fraction)
    _check_below(settings.alert_below)
    _check_bounds(settings)
    if settings.engine not in ("auto", "none"):
        raise ConfigError(
            f"engine is {settings.engine!r}; it must be 'auto' (DistributedDataParallel, FSDP2 or "
            "another wrapper averages the gradients) or 'none' (the script does)"
        )
    if not isinstance(settings.policy, str):
        raise ConfigError(
            f"policy is {settings.policy!r}; it must be a name, such as 'adaptive' or "
            "'static:20,100', or an object with the methods of evenstride.Policy"
        )


def _check_fraction(fraction: object) -> None:
    number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
    if fraction is not None and not (number and 0 < float(str(fraction)) <= 1):
        raise ConfigError(
            f"memory_fraction is {fraction!r}; it must be a fraction of the memory above 0 and at "
            "most 1, such as 0.9, or None to let shares grow without this limit"
        )


def _check_below(part: object) -> None:
    number = isinstance(part, (int, float)) and not isinstance(part, bool)
    if not (number and 0 <= float(str(part)) < 1):
        raise ConfigError(
            f"alert_below is {part!r}; it must be a fraction of a worker's own best speed, at "
            "least 0 (never report a worker as slow) and less than 1, such as 0.7"
        )


def _check_bounds(settings: Settings) -> None:
    check_whole("min_share", settings.min_share, least=1)
    if settings.max_share is not None:
        check_whole("max_share", settings.max_share, least=1)
    if settings.quantum is not None:
        check_whole("quantum", settings.quantum, least=1)
