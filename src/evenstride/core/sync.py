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

import re
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar

from evenstride.core.sync_settings import RANGES, Mode, example, refused, settings_of
from evenstride.errors import ConfigError

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
class Served(Mode):
    """Each step applies the exact gradient over all workers, on parameter servers: ``bsp-ps``.

    Args:
        servers: processes that hold a part of the parameters each, at least 1.

    Raises:
        ConfigError: a setting is of another type, or outside its range.
    """

    name: ClassVar[str] = "bsp-ps"
    servers: int = 1

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
    servers: int = 1
    rate: str = "constant"

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
        server", NIPS 2013; see `evenstride.core.clocks` for the rule and how far it was checked.
    """

    name: ClassVar[str] = "ssp"
    lockstep: ClassVar[bool] = False
    staleness: int = 3
    servers: int = 1
    rate: str = "constant"

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
    every: int
    after: int = 0
    outer_rate: float = 1.0
    outer_momentum: float = 0.0

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
class Delayed(Mode):
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


SyncMode = AllReduce | Served | Asynchronous | StaleSynchronous | LocalSgd | Delayed
"""A synchronisation mode: ``str(mode)`` is the text that `sync_from_spec` reads."""

_KINDS: tuple[type[SyncMode], ...] = (
    AllReduce,
    Served,
    Asynchronous,
    StaleSynchronous,
    LocalSgd,
    Delayed,
)
SYNC_NAMES = tuple(kind.name for kind in _KINDS)
_CALL = re.compile(r"([^(:]*)(?:\((.*)\)|:([^()]*))?", re.DOTALL)
_SETTING = re.compile(r"\s*\w+\s*=")


def rate_factor(rate: str, staleness: int) -> float:
    """Return what an update's step size is multiplied by.

    Args:
        rate: ``constant`` is 1; ``staleness`` is one over the staleness, where that is above 1.
        staleness: of the update, see `evenstride.core.clocks`.

    Source:
        Zhang et al., "Staleness-aware async-SGD for distributed deep learning", IJCAI 2016,
        arXiv 1511.05950. Not verified: the paper was not at hand. Others' descriptions of it agree
        on the quotient, and that an update without staleness keeps its step size.

    >>> [rate_factor("staleness", n) for n in (0, 1, 4)]
    [1.0, 1.0, 0.25]
    """
    return 1.0 / max(staleness, 1) if rate == "staleness" else 1.0


def sync_from_spec(spec: str) -> SyncMode:
    """Return the mode that a specification names.

    Args:
        spec: a name as it comes, or with settings: ``ssp(staleness=2,servers=2)``, which is the
            form of ``str(mode)``, or ``ssp:staleness=2,servers=2`` as policies have it.

    Raises:
        ConfigError: there is no such mode or setting, or a value is outside its range.

    >>> sync_from_spec("asp:rate=staleness")
    Asynchronous(servers=1, rate='staleness')
    >>> str(sync_from_spec("ssp(staleness=2, servers=1)"))
    'ssp(staleness=2)'
    """
    read = _CALL.fullmatch(spec.strip())
    name = (read[1] if read else re.split(r"[(:]", spec)[0]).strip()
    kind = next((kind for kind in _KINDS if kind.name == name), None)
    if kind is None:
        raise _unknown(spec, name)
    if read is None:
        raise _not_understood(spec, spec.strip()[len(name) :], kind)
    return kind(**_values(spec, kind, read[2] or read[3] or ""))


def split_specs(specs: str) -> tuple[str, ...]:
    """Return the specifications of a list with commas between them; none of an empty one.

    Commas in parentheses are of a mode's settings, and so are those before a ``key=value`` that
    follows a mode with a colon.

    >>> split_specs("bsp,ssp(staleness=2,servers=2),asp:servers=2,rate=staleness")
    ('bsp', 'ssp(staleness=2,servers=2)', 'asp:servers=2,rate=staleness')
    """
    found = list[str]()
    for part in re.split(r",(?![^(]*\))", specs):
        if found and ":" in found[-1] and _SETTING.match(part):
            found[-1] += f",{part.strip()}"
        elif part.strip():
            found.append(part.strip())
    return tuple(found)


def _values(spec: str, kind: type[SyncMode], argument: str) -> dict[str, Any]:
    """Return the settings that an argument such as ``staleness=2`` names.

    Raises:
        ConfigError: a setting is not one of the mode's, is missing, or not of its type.
    """
    known, values = {field.name for field in fields(kind)}, dict[str, Any]()
    for part in filter(None, map(str.strip, argument.split(","))):
        name, equals, text = (piece.strip() for piece in part.partition("="))
        if name not in known or not equals:
            raise _not_understood(spec, part, kind)
        if name in values:
            raise ConfigError(f"sync {spec!r} sets {name} twice; {kind.name} has one; set it once")
        try:
            values[name] = RANGES[name].kind(text)
        except ValueError:
            raise refused(kind, name, repr(text)) from None
    for field in fields(kind):
        if field.default is MISSING and field.name not in values:
            raise refused(kind, field.name, "not set")
    return values


def _not_understood(spec: str, at: str, kind: type[Mode]) -> ConfigError:
    return ConfigError(
        f"sync {spec!r} is not understood at {at!r}; settings of {kind.name}: "
        f"{settings_of(kind)}; write {example(kind)}"
    )


def _unknown(spec: str, name: str) -> ConfigError:
    near = get_close_matches(name.lower(), SYNC_NAMES, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return ConfigError(
        f"unknown sync mode {spec!r}{hint}; the modes are {', '.join(SYNC_NAMES)}; settings go in "
        "parentheses: ssp(staleness=3), local-sgd(every=8)"
    )
