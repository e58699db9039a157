"""The synchronisation modes, and the texts that name them.

==========  ============================================================================
mode        meaning
==========  ============================================================================
bsp         one gradient per step over all workers, by all-reduce; the default.
bsp-ps      the same, through parameter servers.
asp         parameter servers apply each worker's update on arrival; no worker waits.
ssp         the same, but no worker begins an update too far ahead of the slowest.
local-sgd   workers train on their own; their weights are averaged from time to time.
delayed     one gradient per step over all workers, applied one step late.
==========  ============================================================================

A mode states which promises of ``bsp`` it does not keep, in whole sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from evenstride.core.spec import (
    check_settings,
    one_of,
    parse_spec,
    settings_in,
    spec_text,
    within,
)
from evenstride.errors import ConfigError, did_you_mean

RATES = ("constant", "staleness")
"""How the step size of an update depends on its staleness, see `rate_factor`."""
_FORM = "{}({})"
_SERVERS = within(int, 1, example=2)
_EVERY = within(
    int,
    1,
    example=8,
    instead="write local-sgd(every=8), or bsp to synchronise the workers in every step",
)


@dataclass(frozen=True, slots=True)
class Mode:
    """Base class of all modes."""

    name: ClassVar[str]
    lockstep: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_settings(f"sync {self.name}", self)

    def __str__(self) -> str:
        return spec_text(self.name, self, _FORM)

    @property
    def forgoes(self) -> tuple[str, ...]:
        """The promises that do not hold, one sentence each."""
        return ()


_TRAJECTORY = (
    "The gradient is not exact, and the trajectory is not unique: updates come from weights of "
    "different versions.",
    "The assignment and order of samples depend on the workers' speeds.",
)


@dataclass(frozen=True, slots=True)
class AllReduce(Mode):
    """Each step applies the exact gradient over all workers, by all-reduce: ``bsp``."""

    name: ClassVar[str] = "bsp"
    servers: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class ParameterServerMode(Mode):
    """Each step applies the exact gradient over all workers, on parameter servers: ``bsp-ps``.

    Args:
        servers: number of processes that each hold a part of the parameters, at least 1.

    Raises:
        ConfigError: a setting is of another type, or outside its range.
    """

    name: ClassVar[str] = "bsp-ps"
    servers: int = field(default=1, metadata=_SERVERS)

    @property
    def forgoes(self) -> tuple[str, ...]:
        """The promises that do not hold, one sentence each."""
        return (
            "Changes to gradients before the optimizer's step, such as clipping, apply to each "
            "worker's part of them, not to their mean.",
        )


@dataclass(frozen=True, slots=True)
class Asynchronous(Mode):
    """Servers apply each worker's update on arrival, and no worker waits: ``asp``.

    Args:
        servers: number of processes that each hold a part of the parameters, at least 1.
        rate: ``constant``, or ``staleness`` to divide an update's step size, see `rate_factor`.

    Raises:
        ConfigError: a setting is of another type, or outside its range.
    """

    name: ClassVar[str] = "asp"
    lockstep: ClassVar[bool] = False
    servers: int = field(default=1, metadata=_SERVERS)
    rate: str = field(default="constant", metadata=one_of(*RATES))

    @property
    def forgoes(self) -> tuple[str, ...]:
        """The promises that do not hold, one sentence each."""
        return (*_TRAJECTORY, "The staleness of an update has no bound.")


@dataclass(frozen=True, slots=True)
class StaleSynchronous(Mode):
    """Like `Asynchronous`, but no worker begins an update too far ahead of the slowest: ``ssp``.

    Args:
        staleness: number of updates by which a worker that begins another may be ahead of the
            slowest, at least 0. With 0, all make their c-th update before any begins the next.
            Each update is still applied by itself, so this differs from ``bsp-ps``.
        servers: number of processes that each hold a part of the parameters, at least 1.
        rate: ``constant``, or ``staleness`` to divide an update's step size, see `rate_factor`.

    Raises:
        ConfigError: a setting is of another type, or outside its range.

    Source:
        Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
        server", NIPS 2013; see `evenstride.core.sync_modes.async_schedule` for the rule and how far
        it was checked.
    """

    name: ClassVar[str] = "ssp"
    lockstep: ClassVar[bool] = False
    staleness: int = field(default=3, metadata=within(int))
    servers: int = field(default=1, metadata=_SERVERS)
    rate: str = field(default="constant", metadata=one_of(*RATES))

    @property
    def forgoes(self) -> tuple[str, ...]:
        """The promises that do not hold, one sentence each."""
        return (
            *_TRAJECTORY,
            f"A worker begins an update at most {self.staleness} updates ahead of the slowest, so "
            f"an update may miss up to {2 * self.staleness + 1} of each other worker's.",
        )


@dataclass(frozen=True, slots=True)
class LocalSgd(Mode):
    """Workers train on their own, and average their weights from time to time: ``local-sgd``.

    Args:
        every: local steps between two averages, at least 1.
        after: steps of plain ``bsp`` first, at least 0; above 0 this is post-local SGD.
        outer_rate: step size of the outer optimizer, above 0. It uses the weights before the
            round minus their average after it as a gradient. With 1 and no momentum, the result
            is the average itself.
        outer_momentum: of the outer optimizer, from 0 to below 1.

    Raises:
        ConfigError: a setting is of another type, or outside its range.

    Source:
        Post-local SGD: Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020,
        arXiv 1808.07217. Outer optimizer: Douillard et al., DiLoCo, arXiv 2311.08105. Not
        verified: only the abstracts of both papers were read.
    """

    name: ClassVar[str] = "local-sgd"
    servers: ClassVar[int] = 0
    every: int = field(metadata=_EVERY)
    after: int = field(default=0, metadata=within(int))
    outer_rate: float = field(default=1.0, metadata=within(float, above=True))
    outer_momentum: float = field(default=0.0, metadata=within(float, 0, 1, below=True))

    @property
    def forgoes(self) -> tuple[str, ...]:
        """The promises that do not hold, one sentence each."""
        if self.every > 1:
            sentences: tuple[str, ...] = (
                "No step equals that of one process on the union of the batches: a gradient "
                "belongs to one worker's own weights.",
                f"Weights agree only after each average, every {self.every} steps.",
            )
        elif self.outer_rate != 1 or self.outer_momentum:
            sentences = ("No step equals that of one process: the outer optimizer changes it.",)
        else:
            sentences = (
                "A step equals that of one process only with plain SGD: other optimizers keep "
                "their own state on each worker.",
            )
        if not self.after:
            return sentences
        return tuple(f"From step {self.after} on, {s[0].lower()}{s[1:]}" for s in sentences)


@dataclass(frozen=True, slots=True)
class DelayedMode(Mode):
    """Each step applies the gradient of the previous step, reduced while it runs: ``delayed``.

    Source:
        After ABS-SGD, arXiv 2308.15164, of which only the abstract was read.
    """

    name: ClassVar[str] = "delayed"
    servers: ClassVar[int] = 0

    @property
    def forgoes(self) -> tuple[str, ...]:
        """The promises that do not hold, one sentence each."""
        return (
            "No step equals that of one process: each update uses a gradient of the weights of "
            "the previous step.",
        )


SyncMode = (
    AllReduce | ParameterServerMode | Asynchronous | StaleSynchronous | LocalSgd | DelayedMode
)
"""A synchronisation mode: ``str(mode)`` is the text that `sync_from_spec` reads."""

_KINDS: tuple[type[SyncMode], ...] = (
    AllReduce,
    ParameterServerMode,
    Asynchronous,
    StaleSynchronous,
    LocalSgd,
    DelayedMode,
)
SYNC_NAMES = tuple(kind.name for kind in _KINDS)


def rate_factor(rate: str, staleness: int) -> float:
    """Return the factor of an update's step size.

    With ``constant`` it is 1. With ``staleness`` it is one over the update's staleness if that is
    above 1 (see `evenstride.core.sync_modes.async_schedule`).
    Source:
        Zhang et al., "Staleness-aware async-SGD for distributed deep learning", IJCAI 2016,
        arXiv 1511.05950. Not verified: the paper was not available. Secondary sources agree
        on the quotient, and that an update without staleness keeps its step size.

    >>> [rate_factor("staleness", n) for n in (0, 1, 4)]
    [1.0, 1.0, 0.25]
    """
    return 1.0 / max(staleness, 1) if rate == "staleness" else 1.0


def sync_from_spec(text: str) -> SyncMode:
    """Return the mode of a specification: a name alone, or with settings.

    ``ssp(staleness=2,servers=2)`` is the form of ``str(mode)``, ``ssp:staleness=2,servers=2`` that
    of policies. `ConfigError` if the mode or a setting is unknown, or a value is out of range.

    >>> sync_from_spec("asp:rate=staleness")
    Asynchronous(servers=1, rate='staleness')
    >>> str(sync_from_spec("ssp(staleness=2, servers=1)"))
    'ssp(staleness=2)'
    """
    spec = parse_spec(text)
    for kind in _KINDS:
        if kind.name == spec.name:
            return kind(**settings_in(spec, "sync", kind, _FORM))
    raise ConfigError(
        f"unknown sync mode {text!r}{did_you_mean(spec.name, SYNC_NAMES)}; available modes: "
        f"{', '.join(SYNC_NAMES)}; settings go in parentheses: ssp(staleness=3), "
        "local-sgd(every=8)"
    )


@dataclass(frozen=True, slots=True)
class RoundPosition:
    """The position of a step in a run; the same on all ranks.

    Rounds of local training count from the start of an epoch, or from the start of local training
    if that is later. The last round of an epoch ends with it. So whether a step ends a round
    follows from the committed position alone. A restored run continues in the same rounds. Every
    completed epoch ends with one model, for evaluation and for checkpoints.
    """

    step: int  # number of steps of the run committed before it, also before a restart.
    position: int  # number of samples of the epoch committed before it.
    window: int  # samples of the step, over all ranks.
    end: int  # number of samples of an epoch that are trained.
    global_batch: int  # samples of a full step.
    last: bool = False  # whether the run ends after it.

    @property
    def ends_epoch(self) -> bool:
        """Whether the epoch, or the run, ends with the step."""
        return self.last or self.position + self.window >= self.end


def on_their_own(mode: LocalSgd, place: RoundPosition) -> bool:
    """Return whether each worker's optimizer uses its own gradient in a step."""
    return place.step >= mode.after


def ends_round(mode: LocalSgd, place: RoundPosition) -> bool:
    """Return whether the weights are averaged after a step.

    >>> mode = LocalSgd(every=3)  # and 5 steps to an epoch
    >>> [ends_round(mode, RoundPosition(5 + s, 4 * s, 4, 20, 4)) for s in range(5)]
    [False, False, True, False, True]
    """
    if not on_their_own(mode, place):
        return False
    in_epoch = -(-place.position // place.global_batch)
    before = min(in_epoch, place.step - mode.after)
    return place.ends_epoch or (before + 1) % mode.every == 0


def place(sizes_bytes: Sequence[int], servers: int) -> tuple[int, ...]:
    """Return the server of each parameter: each goes whole to the emptiest one, largest first.

    `ConfigError` if there are no parameters, or fewer than servers. Cost: ``O(n log
    n + n s)`` for ``n`` parameters and ``s`` servers.

    >>> place([400, 100, 250, 40], servers=2)
    (0, 1, 1, 1)
    """
    if not sizes_bytes:
        raise ConfigError(
            "the model has no trainable parameters, so parameter servers have nothing to hold; "
            "set requires_grad on some parameters, or do not watch the model"
        )
    if not 1 <= servers <= len(sizes_bytes):
        raise ConfigError(
            f"cannot use {servers} parameter servers: the model has {len(sizes_bytes)} trainable "
            f"parameters, each held by one server; use 1 to {len(sizes_bytes)} servers"
        )
    held_bytes, held = [0] * servers, [0] * servers
    places = [0] * len(sizes_bytes)
    for index in sorted(range(len(sizes_bytes)), key=lambda i: (-sizes_bytes[i], i)):
        # By number if bytes are equal, so that parameters without elements are spread, too.
        server = min(range(servers), key=lambda s: (held_bytes[s], held[s], s))
        places[index] = server
        held_bytes[server] += sizes_bytes[index]
        held[server] += 1
    return tuple(places)
