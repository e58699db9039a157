"""Requirements of a model to be trained in each synchronisation mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from evenstride.core.policies.static import is_fixed
from evenstride.core.sync_modes.mode_specs import LocalSgd, SyncMode
from evenstride.errors import ConfigError
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.coordination.leader import Leader, verdict_to_plain
from evenstride.runtime.coordination.settings_agreement import check_declared
from evenstride.runtime.engines.divided_models import check_other_dims, tell_of_the_rest
from evenstride.runtime.engines.model_agreement import require_engine
from evenstride.runtime.engines.replica_groups import Islands, check_island
from evenstride.runtime.engines.weight_drift import USUAL_STEPS
from evenstride.runtime.noise.noise_meter import check_model
from evenstride.runtime.session.rank_state import RankState
from evenstride.runtime.settings import Settings
from evenstride.runtime.synchronisation.synchroniser import Synchroniser, require_plain


class WatchRules:
    """Refuses models that cannot be trained with the settings of the run.

    ``islands`` is ``None`` if each rank is a worker, and ``sync`` is ``None`` if an engine
    averages. ``calibrates`` is whether this run is a calibration.
    """

    def __init__(
        self,
        settings: Settings,
        world_size: int,
        islands: Islands | None,
        sync: Synchroniser | None,
        state: RankState,
        *,
        calibrates: bool,
    ) -> None:
        self._settings, self._world_size, self._islands = settings, world_size, islands
        self.sync, self._noise, self._progress = sync, state.noise, state.progress
        self._calibrates = calibrates

    def check(self, model: nn.Module, asked: Plain, group: dist.ProcessGroup | None) -> None:
        """Raise a `ConfigError` unless this rank can train the model."""
        mode = self._settings.mode
        check_island(model, group, self._islands)
        if group is not None and not is_fixed(self._settings.decides):
            ranks = dist.get_process_group_ranks(group)
            if len(ranks) < dist.get_world_size():
                check_other_dims(ranks)
        if self._noise is not None:
            check_model(self._noise.every, model)
        if self.sync is not None:
            require_plain(model, mode)
            _refuse_hook(asked["compress"], mode)
            _refuse_check(asked["drift_check"], mode)
        elif self._settings.engine != "none" and group is not None:
            require_engine(model, self._world_size)

    def drift_check(self, kinds: Sequence[str]) -> int:
        """Return the steps between two comparisons of weights, if the script leaves it open."""
        return USUAL_STEPS if len(set(kinds)) > 1 and _keeps_alike(self._settings.mode) else 0

    def check_declared(self, assumed: Sequence[str], kinds: Sequence[str]) -> None:
        """Raise if the policy uses FLOP/s of another type of device than a rank's model is on."""
        check_declared(self._settings.decides, assumed, kinds)

    def tell_of_the_rest(self, *, measured: bool) -> None:
        """Warn if there are processes whose shares this run does not change."""
        if not is_fixed(self._settings.decides) and measured:
            tell_of_the_rest(self._world_size, dist.get_world_size())

    def unmeasured(self, leader: Leader, why: str) -> Plain:
        """Return the leader's decision when steps cannot be measured.

        Raises if a setting that needs measured times was given, or if the model comes after the
        first step.
        """
        self._refuse_policy(why)
        step = self._progress.step
        if step:
            raise ConfigError(
                f"watch() got a model whose steps cannot be measured, after {step} measured steps: "
                f"{why}; watch all models before the first step"
            )
        return verdict_to_plain(leader.not_measured(step, why))

    def _refuse_policy(self, why: str) -> None:
        settings = self._settings
        if self._calibrates:
            raise ConfigError(f"the calibration needs measured times, which are missing: {why}")
        if settings.policy_given and not is_fixed(settings.decides):
            raise ConfigError(
                f"policy {settings.policy!r} needs measured times, which are missing: {why}. "
                'Leave the policy out for equal shares, or set "uniform" or "static:20,100" (in '
                "the script or in EVENSTRIDE_POLICY)"
            )


def _refuse_hook(compress: str | None, mode: SyncMode) -> None:
    if compress is not None:
        raise ConfigError(
            f"watch(compress={compress!r}) is a hook of DistributedDataParallel's all-reduce, "
            f'which sync="{mode}" does not use; leave it out, or use sync="bsp"'
        )


def _keeps_alike(mode: SyncMode) -> bool:
    """Return whether all ranks have the same weights after every step."""
    return mode.lockstep and not isinstance(mode, LocalSgd)


def _refuse_check(drift_check: int | None, mode: SyncMode) -> None:
    if drift_check and not _keeps_alike(mode):
        raise ConfigError(
            f"watch(drift_check={drift_check}) compares the ranks' weights, which differ between "
            f'the steps of sync="{mode}"; leave it out, or use sync="bsp"'
        )
