"""How workers bring their work together: the modes, and the texts that name them.

==========  ============================================================================
mode        what it does
==========  ============================================================================
bsp         one gradient per step over all workers, by all-reduce; the default
bsp-ps      the same, through parameter servers
asp         parameter servers apply each worker's update when it comes; nobody waits
ssp         likewise, but nobody begins an update too far ahead of the slowest
local-sgd   workers train on their own; their weights are averaged from time to time
delayed     one gradient per step over all workers, applied one step late
==========  ============================================================================

A mode says what it forgoes of the promises that ``bsp`` keeps, in whole sentences.
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
"""How the step size of an update may follow its staleness, see `rate_factor`."""
_FORM = "{}({})"
_SERVERS = within(int, 1, example=2)
_EVERY = within(
    int,
    1,
    example=8,
    instead="write local-sgd(every=8), or bsp to bring the workers together in every step",
)


@dataclass(frozen=True, slots=True)
class Mode:
    """What all modes have."""

    name: ClassVar[str]
    lockstep: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_settings(f"sync {self.name}", self)

    def __str__(self) -> str:
        return spec_text(self.name, self, _FORM)

    @property
    def forgoes(self) -> tuple[str, ...]:
        """The promises that do not hold, a sentence each."""
        return ()


_TRAJECTORY = (
    "The gradient is not exact and there is no one trajectory: updates come from weights of "
    "different ages.",
    "Which worker trains a sample, and in which order, depends on the workers' speeds.",
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
        servers: processes that hold a part of the parameters each, at least 1.

    Raises:
        ConfigError: a setting is of another type, or outside its range.
    """

    name: ClassVar[str] = "bsp-ps"
    servers: int = field(default=1, metadata=_SERVERS)

    @property
    def forgoes(self) -> tuple[str, ...]:
        """The promises that do not hold, a sentence each."""
        return (
            "What is done to gradients before the optimizer's step, such as clipping, is done to "
            "each worker's part of them, not to their mean.",
        )


@dataclass(frozen=True, slots=True)
class Asynchronous(Mode):
    """Servers apply each worker's update when it comes, and nobody waits: ``asp``.

    Args:
        servers: processes that hold a part of the parameters each, at least 1.
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
        """The promises that do not hold, a sentence each."""
        return (*_TRAJECTORY, "The staleness of an update has no bound.")


@dataclass(frozen=True, slots=True)
class StaleSynchronous(Mode):
    """As `Asynchronous`, but nobody begins an update too far ahead of the slowest: ``ssp``.

    Args:
        staleness: how many updates a worker that begins another one may be ahead of the slowest,
            at least 0. With 0, all make their c-th update before anybody begins the next; each
            is still applied by itself, so that this is not ``bsp-ps``.
        servers: processes that hold a part of the parameters each, at least 1.
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
        """The promises that do not hold, a sentence each."""
        return (
            *_TRAJECTORY,
            f"A worker begins an update at most {self.staleness} updates ahead of the slowest, so "
            f"an update may miss up to {2 * self.staleness + 1} of each other worker's.",
        )


@dataclass(frozen=True, slots=True)
class LocalSgd(Mode):
    """Workers train on their own, and average their weights from time to time: ``local-sgd``.

    Args:
        every: local steps from one average to the next, at least 1.
        after: steps of plain ``bsp`` first, at least 0; above 0 this is post-local SGD.
        outer_rate: step size of the outer optimizer, above 0. It takes the weights before the
            round less their average after it for a gradient; with 1 and no momentum, the
            average itself is what comes out.
        outer_momentum: of the outer optimizer, from 0 to below 1.

    Raises:
        ConfigError: a setting is of another type, or outside its range.

    Source:
        post-local SGD: Lin et al., "Don't use large mini-batches, use local SGD", ICLR 2020,
        arXiv 1808.07217. Outer optimizer: Douillard et al., DiLoCo, arXiv 2311.08105. Not
        verified: of both papers the abstract was read only.
    """

    name: ClassVar[str] = "local-sgd"
    servers: ClassVar[int] = 0
    every: int = field(metadata=_EVERY)
    after: int = field(default=0, metadata=within(int))
    outer_rate: float = field(default=1.0, metadata=within(float, above=True))
    outer_momentum: float = field(default=0.0, metadata=within(float, 0, 1, below=True))

    @property
    def forgoes(self) -> tuple[str, ...]:
        """The promises that do not hold, a sentence each."""
        if self.every > 1:
            sentences: tuple[str, ...] = (
                "No step equals that of one process on the union of the batches: a gradient is "
                "of a worker's own weights.",
                f"Weights agree only after each average, which is every {self.every} steps.",
            )
        elif self.outer_rate != 1 or self.outer_momentum:
            sentences = ("No step equals that of one process: the outer optimizer changes it.",)
        else:
            sentences = (
                "A step equals that of one process only with plain SGD: other optimizers keep a "
                "state of their own on each worker.",
            )
        if not self.after:
            return sentences
        return tuple(f"From step {self.after} on, {s[0].lower()}{s[1:]}" for s in sentences)


@dataclass(frozen=True, slots=True)
class DelayedMode(Mode):
    """Each step applies the gradient of the step before, which came while it ran: ``delayed``.

    Source:
        after ABS-SGD, arXiv 2308.15164, of which the abstract was read.
    """

    name: ClassVar[str] = "delayed"
    servers: ClassVar[int] = 0

    @property
    def forgoes(self) -> tuple[str, ...]:
        """The promises that do not hold, a sentence each."""
        return (
            "No step equals that of one process: each update uses a gradient of the weights one "
            "step before.",
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
    """Return what an update's step size is multiplied by.

    A rate of ``constant`` is 1; ``staleness`` is one over the update's staleness, where that is
    above 1 (see `evenstride.core.sync_modes.async_schedule`).

    Source:
        Zhang et al., "Staleness-aware async-SGD for distributed deep learning", IJCAI 2016,
        arXiv 1511.05950. Not verified: the paper was not at hand. Others' descriptions of it agree
        on the quotient, and that an update without staleness keeps its step size.

    >>> [rate_factor("staleness", n) for n in (0, 1, 4)]
    [1.0, 1.0, 0.25]
    """
    return 1.0 / max(staleness, 1) if rate == "staleness" else 1.0


def sync_from_spec(text: str) -> SyncMode:
    """Return the mode that a specification names: a name as it comes, or with settings.

    ``ssp(staleness=2,servers=2)`` is the form of ``str(mode)``, ``ssp:staleness=2,servers=2`` that
    of policies. `ConfigError` if there is no such mode or setting, or a value is outside its range.

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
        f"unknown sync mode {text!r}{did_you_mean(spec.name, SYNC_NAMES)}; the modes are "
        f"{', '.join(SYNC_NAMES)}; settings go in parentheses: ssp(staleness=3), "
        "local-sgd(every=8)"
    )


@dataclass(frozen=True, slots=True)
class RoundPosition:
    """Where a step stands in a run; the same on all ranks.

    Rounds of training on one's own are counted from where an epoch begins, or from where that
    training does if it is later; the last of an epoch is as long as what is left. So whether a step
    ends a round follows from the committed position alone: a restored run goes on in the same
    rounds, and every epoch that has ended leaves one model behind, for evaluation and for
    checkpoints.
    """

    step: int  # steps of the run that were committed before it, also before a restart
    position: int  # samples of the epoch that were committed before it
    window: int  # samples of the step, over all ranks
    end: int  # samples of an epoch that are trained
    global_batch: int  # samples of a full step
    last: bool = False  # whether the run is to end after it

    @property
    def ends_epoch(self) -> bool:
        """Whether nothing of the epoch, or of the run, is left after the step."""
        return self.last or self.position + self.window >= self.end


def on_their_own(mode: LocalSgd, place: RoundPosition) -> bool:
    """Return whether each worker's optimizer steps by its own gradient in a step."""
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
    """Return the server of each parameter: whole ones, the largest first, to who has least.

    `ConfigError` if there are more servers than parameters, or none of the latter. Cost: ``O(n log
    n + n s)`` for ``n`` parameters and ``s`` servers.

    >>> place([400, 100, 250, 40], servers=2)
    (0, 1, 1, 1)
    """
    if not sizes_bytes:
        raise ConfigError(
            "the model has no parameters that are trained, so there is nothing for parameter "
            "servers to hold; leave requires_grad on for some, or do not watch it"
        )
    if not 1 <= servers <= len(sizes_bytes):
        raise ConfigError(
            f"{servers} parameter servers were asked for, and the model has {len(sizes_bytes)} "
            f"parameters that are trained, each held by one server; ask for 1 to "
            f"{len(sizes_bytes)} servers"
        )
    held_bytes, held = [0] * servers, [0] * servers
    places = [0] * len(sizes_bytes)
    for index in sorted(range(len(sizes_bytes)), key=lambda i: (-sizes_bytes[i], i)):
        # By number where bytes are equal, so that parameters without elements are dealt out, too.
        server = min(range(servers), key=lambda s: (held_bytes[s], held[s], s))
        places[index] = server
        held_bytes[server] += sizes_bytes[index]
        held[server] += 1
    return tuple(places)
