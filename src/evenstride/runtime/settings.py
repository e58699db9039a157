"""What the user asked of a `Stride`, with the environment's wishes filled in.

Includes ``Stride(global_batch="auto", bounds=(64, 1024))``, which leaves the global batch open.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from evenstride.core.diagnostics.alerts import USUAL_BELOW
from evenstride.core.policies import is_policy, policy_from_spec, spec_of
from evenstride.core.policy import Policy
from evenstride.core.sync_modes.mode_specs import AllReduce, Mode, SyncMode, sync_from_spec
from evenstride.errors import ConfigError
from evenstride.runtime.environment import Environment
from evenstride.runtime.noise.noise_meter import check_mode
from evenstride.runtime.usage_errors import check_whole, whole

AUTO = "auto"


USUAL_EVERY = 10
"""Steps from one whose gradient's noise is measured to the next, where the batch follows it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The global batch of a process."""

    samples: int  # of a step; of one that is chosen while it trains, those of the first epoch
    # Between which the run may have had another one before; `None` where it may not.
    bounds: tuple[int, int] | None = None
    chosen: bool = False  # whether it is chosen anew where an epoch ends


def batch_of(
    asked: int | str,
    bounds: tuple[int, int] | None,
    environment: int | None,
    *,
    averages: bool = True,
) -> Batch:
    """Return the batch that a `Stride` trains with.

    An open one is what ``EVENSTRIDE_GLOBAL_BATCH`` says, if that is set: somebody else chooses it,
    from start to start. Else it begins with the lower bound and is chosen at the end of each epoch.
    Where the gradients of a step are not averaged, their noise cannot be told, and it stays the
    lower bound; a state of another one is refused then.

    Args:
        asked: samples, or ``auto``.
        bounds: smallest and largest, with ``auto``.
        environment: ``EVENSTRIDE_GLOBAL_BATCH``; ``None`` without it, 0 for the lower bound.
        averages: whether the mode of synchronisation averages the gradients of each step.
    """
    if not isinstance(asked, str) or asked != AUTO:
        if bounds is not None:
            raise ConfigError(
                f"bounds={bounds!r} are those of a global batch that is left open; give them with "
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
            f'global_batch="auto" needs bounds, and they are {bounds!r}; give the smallest and the '
            "largest batch that may be chosen, such as bounds=(64, 1024)"
        )
    low, high = map(whole, bounds)
    check_whole("the lower of bounds", low, least=1)
    check_whole("the upper of bounds", high, least=low)
    return low, high


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked of a `Stride`, the environment's wishes filled in."""

    global_batch: int  # samples per step, over all workers
    seed: int  # of the order of the samples and of their randomness
    policy: str  # specification of the policy
    min_share: int  # fewest samples of this rank in a full step
    max_share: int | None  # most samples of this rank in a step; `None` for no limit
    quantum: int  # this rank's shares are multiples of it
    memory_fraction: float | None  # part of its memory that a share may fill; `None` for no limit
    trace: Path | None  # where the leader writes the trace; `None` for nowhere
    # Steps after which the pass over the loader ends, and the next ends the program.
    max_steps: int | None
    step_file: Path | None = None  # where the leader keeps its step count; `None` for nowhere
    sync: str = "bsp"  # mode of synchronisation
    # Steps from one whose gradient's noise is measured to the next; 0 for none.
    noise_every: int = 0
    # Between which the global batch may become another one; `None` where it may not.
    bounds: tuple[int, int] | None = None
    chosen: bool = False  # whether it does where an epoch ends; else only at a restart
    # Where the leader tells what it knows; see `evenstride.runtime.sinks.sink_settings`.
    sinks: tuple[Any, ...] = ()
    # Part of its best speed below which a worker is named; 0 for never.
    alert_below: float = USUAL_BELOW
    engine: str = "auto"  # `auto`, or `none` if the script averages the gradients itself
    policy_given: bool = False  # whether script or environment name the policy
    # The policy itself where the script gave an object; `None` for a specification.
    own_policy: Policy[Any] | None = None

    @property
    def decides(self) -> Policy[Any]:
        """The policy that sets the shares; `ConfigError` if its specification is none."""
        return policy_from_spec(self.policy) if self.own_policy is None else self.own_policy

    @property
    def mode(self) -> SyncMode:
        """The mode of synchronisation; `ConfigError` if its specification is none."""
        if not isinstance(self.sync, str):
            raise ConfigError(
                f"sync is {self.sync!r}; it must name a mode, such as 'bsp' or 'bsp-ps(servers=2)'"
            )
        return sync_from_spec(self.sync)


class StrideArguments(TypedDict):
    """The arguments of a `Stride` that became settings; ``None`` leaves one to the environment."""

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
    """Return the settings: an argument wins, then the environment, then what is usual.

    Nothing is checked here, but by `check`, with the other ranks. Sinks are checked already.
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
        quantum=whole(asked["quantum"]),
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
    """Return whether a mode averages gradients every step; unknown modes count as averaging."""
    sync = _text_of(sync)
    try:
        return not isinstance(sync, str) or isinstance(sync_from_spec(sync), AllReduce)
    except ConfigError:  # told when the settings are checked, with the other ranks
        return True


def _noise_every(asked: Any, environment: Environment, batch: Batch) -> Any:
    if asked is not None:
        return asked
    if environment.noise_every is not None:
        return environment.noise_every
    return USUAL_EVERY if batch.chosen else 0


def check(settings: Settings) -> None:
    """Refuse settings that cannot be, whoever else takes part, with a `ConfigError`."""
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
            f"memory_fraction is {fraction!r}; it must be a part of the memory above 0 and at most "
            "1, such as 0.9, or None to let shares grow whatever they take"
        )


def _check_below(part: object) -> None:
    number = isinstance(part, (int, float)) and not isinstance(part, bool)
    if not (number and 0 <= float(str(part)) < 1):
        raise ConfigError(
            f"alert_below is {part!r}; it must be a part of a worker's own best speed from 0 "
            "(never name one as slow) up to, not including, 1, such as 0.7"
        )


def _check_bounds(settings: Settings) -> None:
    check_whole("min_share", settings.min_share, least=1)
    if settings.max_share is not None:
        check_whole("max_share", settings.max_share, least=1)
    check_whole("quantum", settings.quantum, least=1)
