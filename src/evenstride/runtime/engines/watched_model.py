"""What happens to a model that is given to `Stride.watch`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenstride.core.policies.static import is_fixed
from evenstride.core.sync_modes.mode_specs import LocalSgd, SyncMode
from evenstride.errors import ConfigError
from evenstride.runtime import usage_errors
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.coordination.messages import verdict_to_plain
from evenstride.runtime.engines.compression import send_compressed
from evenstride.runtime.engines.device_meshes import tell_of_the_rest
from evenstride.runtime.engines.forward_timing import (
    averages,
    bypassed,
    compiled,
    engine_exists,
    engine_of,
    gradient_digest,
    static_graph,
    watch_forward,
)
from evenstride.runtime.engines.fsdp import check_engine, is_sharded, subtract_collectives
from evenstride.runtime.engines.model_agreement import device_of, meet
from evenstride.runtime.engines.replica_groups import check_island
from evenstride.runtime.engines.weight_drift import USUAL_STEPS, DriftGuard
from evenstride.runtime.environment import Environment
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.loss.loss_scaling import LossScaling
from evenstride.runtime.memory.peak_report import PeakReport
from evenstride.runtime.noise.noise_meter import check_model
from evenstride.runtime.settings import Settings
from evenstride.runtime.synchronisation.synchroniser import begin_alike, require_plain, still
from evenstride.runtime.team import Team
from evenstride.runtime.timing.step_timer import StepTimer


class WatchContext(Protocol):
    """What watching needs of a member."""

    @property
    def scaling(self) -> LossScaling:
        """The weighting of its batches."""
        ...

    @property
    def timer(self) -> StepTimer:
        """The clock of its steps."""
        ...

    @property
    def progress(self) -> CommittedPosition:
        """Its position."""
        ...

    def stop_measuring(self, verdict: Plain) -> None:
        """Report no steps from now on, and put the leader's decision about that in force."""
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


class WatchedModels:
    """Watches the models of one rank.

    Args:
        member: whose they are.
        team: that trains them.
        holding: what of them is held in memory.
        settings: of the run.
        environment: of this process.
    """

    def __init__(
        self,
        member: WatchContext,
        team: Team,
        holding: PeakReport,
        settings: Settings,
        environment: Environment,
    ) -> None:
        self._member, self._team, self._holding = member, team, holding
        self._settings, self._environment = settings, environment
        self._mode, self._by_hand = settings.mode, settings.engine == "none"
        self.not_measured = ""
        """Why steps cannot be measured; empty while they can."""

    def watch(self, model: nn.Module, asked: Plain) -> None:
        """Time the model's forward pass, and know its parameters; agree that it can be trained."""
        team, scaling = self._team, self._member.scaling
        met = meet(
            model,
            asked,
            team.group,
            partial(self._agree, model, asked),
            self._environment.connections,
        )
        kinds = tuple(met["kinds"])
        check_engine(model, kinds)
        if met["verdict"] is not None:
            self.not_measured = met["not_measured"]
            self._member.stop_measuring(met["verdict"])
        if team.leader is not None and team.group is not None and not scaling.models:
            self._tell_of_the_rest()
        if any(known is model for known in scaling.models):
            return
        if asked["compress"] is not None:
            send_compressed(model)
        every = asked["drift_check"]
        if every is None:
            every = USUAL_STEPS if len(set(kinds)) > 1 and _keeps_alike(self._mode) else 0
        if every and team.group is not None:
            self._guard_against_drift(model, every)
        self._mark_waits(model)
        scaling.watch(model)
        if asked["check_loss"] and scaling.convention is not None:
            scaling.convention.watch(model)
        if scaling.noise is not None:
            scaling.noise.watch(model)
        self._holding.watch(model)
        scaling.mark(
            unrecorded=static_graph(model), sharded=is_sharded(model), compiled=compiled(model)
        )

    def _mark_waits(self, model: nn.Module) -> None:
        """Time the model on its device, and let its engine's waits be marked as such."""
        scaling = self._member.scaling
        scaling.time_on(device_of(model))
        subtract_collectives(model, lambda: self._member.timer)
        if scaling.sync is not None:
            with self._member.timer.waiting():
                scaling.sync.watch(model)
                begin_alike(model, self._team.group)
            still(model)
            return
        watch_forward(model, lambda: self._member.timer)
        if isinstance(engine := engine_of(model), DistributedDataParallel):
            scaling.inner_waits.watch(engine)

    def check_first_step(self) -> None:
        """Raise if the first step's gradients were not averaged; collective if that is in doubt.

        Raises:
            ConfigError: nothing in any rank's process averages gradients.
            UsageError: the loop calls the module inside its DistributedDataParallel.
        """
        models, world_size = self._member.scaling.models, self._team.world_size
        if self._team.group is None or self._by_hand or self._member.scaling.sync is not None:
            return
        doubtful = [model for model in models if bypassed(model)]
        if models and not doubtful:
            return

        def show() -> Plain:
            engine = bool(models) or engine_exists()
            return {"engine": engine, "gradients": [gradient_digest(one) for one in doubtful]}

        def judge(shown: list[Plain]) -> Plain:
            if not all(mine["engine"] for mine in shown):
                raise usage_errors.no_engine(world_size)
            if any(mine["gradients"] != shown[0]["gradients"] for mine in shown):
                raise usage_errors.engine_bypassed(type(engine_of(doubtful[0])).__name__)
            return {}

        with self._member.timer.waiting():
            self._member.agree("the first step", show, judge)
        if not models and self._team.rank == 0:
            usage_errors.tell_of_unwatched()

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
            elif not self._by_hand and self._team.group is not None:
                _require_engine(model, self._team.world_size)
            return shown

        def judged(shown: list[Plain]) -> Plain:
            met = judge(shown)
            check_engine(model, met["kinds"])
            return {**met, "verdict": self._decided(met["not_measured"])}

        return self._member.agree("watch()", checked, judged)

    def _decided(self, why: str) -> Plain | None:
        """Return the leader's decision where steps cannot be measured; ``None`` where they can."""
        if not why or self.not_measured or self._team.leader is None:
            return None
        _refuse_policy(self._settings, self._environment, why)
        step = self._member.progress.step
        if step:
            raise ConfigError(
                f"watch() got a model whose steps cannot be measured after {step} steps were: "
                f"{why}; watch all models before the first step"
            )
        return verdict_to_plain(self._team.leader.not_measured(step, why))

    def _tell_of_the_rest(self) -> None:
        if not is_fixed(self._settings.decides) and not self.not_measured:
            tell_of_the_rest(self._team.world_size, dist.get_world_size())

    def _guard_against_drift(self, model: nn.Module, every: int) -> None:
        scaling = self._member.scaling
        drift = scaling.drift
        if drift is None:
            group = self._member.own_group("gloo")
            drift = DriftGuard(group, every, lambda: self._member.timer.waiting())
            scaling.guard_against_drift(drift)
        drift.watch(model)


def _require_engine(model: nn.Module, world_size: int) -> None:
    if not averages(model) and any(p.requires_grad for p in model.parameters()):
        raise usage_errors.bare(type(model).__name__, world_size)


def _refuse_policy(settings: Settings, environment: Environment, why: str) -> None:
    """Refuse what was asked for by name and needs measured times.

    Raises:
        ConfigError: a policy that moves shares, or a calibration.
    """
    if environment.calibrate is not None:
        raise ConfigError(f"the calibration needs measured times, and there are none: {why}")
    if settings.policy_given and not is_fixed(settings.decides):
        raise ConfigError(
            f"policy {settings.policy!r} needs measured times, and there are none: {why}. Leave "
            'the policy out for equal shares, or set "uniform" or "static:20,100" (in the script '
            "or in EVENSTRIDE_POLICY)"
        )


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
