"""What happens to a model that is given to `Stride.watch`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch import nn

from evenstride.core.sync import LocalSgd, SyncMode
from evenstride.errors import ConfigError
from evenstride.runtime.agreement import Plain
from evenstride.runtime.compression import send_compressed
from evenstride.runtime.drift import USUAL_STEPS, DriftGuard
from evenstride.runtime.holding import Holding
from evenstride.runtime.islands import check_island
from evenstride.runtime.meeting import meet
from evenstride.runtime.noise import check_model
from evenstride.runtime.scaling import Scaling
from evenstride.runtime.setup import Team
from evenstride.runtime.sharded import check_engine, subtract_collectives
from evenstride.runtime.synchronising import begin_alike, require_plain, still
from evenstride.runtime.timing import StepTimer
from evenstride.runtime.watch import static_graph, watch_forward


class Watcher(Protocol):
    """What watching needs of a member."""

    @property
    def scaling(self) -> Scaling:
        """The weighting of its batches."""
        ...

    @property
    def timer(self) -> StepTimer:
        """The clock of its steps."""
        ...

    def agree(
        self, call: str, show: Callable[[], Plain], judge: Callable[[list[Plain]], Plain]
    ) -> Plain:
        """Return what the leader makes of what all ranks show."""
        ...

    def own_group(self, backend: str | None = None) -> dist.ProcessGroup | None:
        """Return another process group of the same ranks."""
        ...

    def refuse_in_loop(self, call: str) -> None:
        """Raise if the training loop is running."""
        ...


class Watching:
    """Watches the models of one rank.

    Args:
        member: whose they are.
        team: that trains them.
        holding: what of them is held in memory.
        mode: of synchronisation.
    """

    def __init__(self, member: Watcher, team: Team, holding: Holding, mode: SyncMode) -> None:
        self._member, self._team, self._holding, self._mode = member, team, holding, mode

    def watch(self, model: nn.Module, asked: Plain) -> None:
        """Time the model's forward pass, and know its parameters; agree that it can be trained."""
        team, scaling = self._team, self._member.scaling
        kinds = meet(model, asked, team.group, partial(self._agree, model, asked))
        check_engine(model, kinds)
        if any(known is model for known in scaling.models):
            return
        if asked["compress"] is not None:
            send_compressed(model)
        every = asked["drift_check"]
        if every is None:
            every = USUAL_STEPS if len(set(kinds)) > 1 and _keeps_alike(self._mode) else 0
        if every and team.group is not None:
            self._guard_against_drift(model, every)
        subtract_collectives(model, lambda: self._member.timer)
        if scaling.sync is not None:
            with self._member.timer.waiting():
                scaling.sync.watch(model)
                begin_alike(model, team.group)
            still(model)
        else:
            watch_forward(model, lambda: self._member.timer, team.world_size)
        scaling.watch(model)
        if scaling.noise is not None:
            scaling.noise.watch(model)
        self._holding.watch(model)
        scaling.unrecorded = scaling.unrecorded or static_graph(model)

    def _agree(
        self,
        model: nn.Module,
        asked: Plain,
        show: Callable[[], Plain],
        judge: Callable[[list[Plain]], Plain],
    ) -> Plain:
        def checked() -> Plain:
            shown = show()  # first, because it refuses engines that have no islands
            check_island(model, self._team.group, self._team.islands)
            self._member.refuse_in_loop("watch()")
            if self._member.scaling.noise is not None:
                check_model(self._member.scaling.noise.every, model)
            if self._member.scaling.sync is not None:
                require_plain(model, self._mode)
                _refuse_hook(asked["compress"], self._mode)
                _refuse_check(asked["drift_check"], self._mode)
            return shown

        return self._member.agree("watch()", checked, judge)

    def _guard_against_drift(self, model: nn.Module, every: int) -> None:
        scaling = self._member.scaling
        if scaling.drift is None:
            group = self._member.own_group("gloo")
            scaling.drift = DriftGuard(group, every, lambda: self._member.timer.waiting())
        scaling.drift.watch(model)


def _refuse_hook(compress: str | None, mode: SyncMode) -> None:
    if compress is not None:
        raise ConfigError(
            f"watch(compress={compress!r}) is a hook of DistributedDataParallel's all-reduce, and "
            f'there is none with sync="{mode}"; leave it out, or use sync="bsp"'
        )


def _keeps_alike(mode: SyncMode) -> bool:
    """Return whether all ranks have the same weights after every step."""
    return mode.lockstep and not isinstance(mode, LocalSgd)


def _refuse_check(drift_check: int | None, mode: SyncMode) -> None:
    if drift_check and not _keeps_alike(mode):
        raise ConfigError(
            f"watch(drift_check={drift_check}) compares the ranks' weights, which differ between "
            f'two steps with sync="{mode}"; leave it out, or use sync="bsp"'
        )
