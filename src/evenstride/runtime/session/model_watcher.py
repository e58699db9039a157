"""What `Stride.watch` does with a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.coordination.leader import Leader
from evenstride.runtime.engines.ddp import send_compressed, watch_forward
from evenstride.runtime.engines.fsdp import check_engine, subtract_collectives
from evenstride.runtime.engines.model_agreement import device_of, meet
from evenstride.runtime.engines.watched_models import engine_of
from evenstride.runtime.engines.weight_drift import DriftGuard
from evenstride.runtime.loss.training_step import TrainingStep
from evenstride.runtime.session.opening_split import OpeningSplit
from evenstride.runtime.session.rank_calls import RankCalls
from evenstride.runtime.session.rank_state import RankState
from evenstride.runtime.session.watch_rules import WatchRules
from evenstride.runtime.settings import Settings
from evenstride.runtime.synchronisation.synchroniser import Synchroniser, begin_alike, still
from evenstride.runtime.team import Team


class ModelWatcher:
    """Prepares a rank's models to be timed, compared and trained.

    ``sync`` replaces the engine's averaging; it is ``None`` if the engine averages. ``connections``
    is ``CUDA_DEVICE_MAX_CONNECTIONS``, if it is set. ``calibrates`` is whether this run is a
    calibration. ``refuse_in_loop`` raises if the training loop is running.
    """

    def __init__(
        self,
        state: RankState,
        step: TrainingStep,
        calls: RankCalls,
        opening: OpeningSplit,
        drift: DriftGuard,
        team: Team,
        leader: Leader | None,
        settings: Settings,
        connections: int | None,
        calibrates: bool,
        sync: Synchroniser | None,
        refuse_in_loop: Callable[[str], None],
    ) -> None:
        self._step, self._peaks = step, state.peaks
        self._calls, self._opening, self._drift = calls, opening, drift
        self._group, self._leader = team.group, leader
        self._assumed = [peer.device_type for peer in team.peers]
        self._refuse_in_loop, self._connections = refuse_in_loop, connections
        self._rules = WatchRules(
            settings,
            team.world_size,
            team.islands,
            sync,
            state,
            calibrates=calibrates,
        )

    def watch(
        self, model: nn.Module, drift_check: int | None, compress: str | None, *, check_loss: bool
    ) -> None:
        """Time the model's forward pass and know its parameters; agree that it can be trained."""
        asked: Plain = {
            "drift_check": drift_check,
            "compress": compress,
            "check_loss": check_loss,
        }
        agree = partial(self._agree, model, asked)
        met = meet(model, asked, self._group, agree, self._connections)
        kinds = tuple(met["kinds"])
        check_engine(model, kinds)
        if met["verdict"] is not None:
            self._opening.stop_measuring(met["not_measured"], met["verdict"])
        watched = self._step.watched
        if self._leader is not None and self._group is not None and not watched.models:
            self._rules.tell_of_the_rest(measured=not self._opening.not_measured)
        # After the agreement, in which all ranks must take part, even for a model they know.
        if any(known is model for known in watched.models):
            return
        if compress is not None:
            send_compressed(model)
        every = self._rules.drift_check(kinds) if drift_check is None else drift_check
        if every and self._group is not None:
            self._drift.watch(model, every, partial(self._calls.own_group, "gloo"))
        self._mark_waits(model)
        self._step.watch(model)
        if check_loss:
            self._step.scaling.check_losses_of(model)
        if self._step.noise is not None:
            self._step.noise.watch(model)
        self._peaks.watch(device_of(model), met["sharing"][self._calls.rank])

    def close(self) -> None:
        """Release the process group; see `Channel.close`."""
        self._group = None

    def _mark_waits(self, model: nn.Module) -> None:
        """Time the model on its device, and mark the waits of its engine."""
        clock, sync = self._step.clock, self._rules.sync
        clock.time_on(device_of(model))
        subtract_collectives(model, clock)
        if sync is not None:
            with clock.waiting():
                sync.watch(model)
                begin_alike(model, self._group)
            still(model)
            return
        watch_forward(model, clock)
        if isinstance(engine := engine_of(model), DistributedDataParallel):
            self._step.inner_waits.watch(engine)

    def _agree(
        self,
        model: nn.Module,
        asked: Plain,
        show: Callable[[], Plain],
        judge: Callable[[list[Plain]], Plain],
    ) -> Plain:
        def checked() -> Plain:
            shown = show()  # first, because it refuses engines that have no shard groups
            self._refuse_in_loop("watch()")
            self._rules.check(model, asked, self._group)
            return shown

        def judged(shown: list[Plain]) -> Plain:
            met = judge(shown)
            check_engine(model, met["kinds"])
            if not self._step.watched.models:  # the first one sets where the rank computes
                self._rules.check_declared(self._assumed, met["kinds"])
            return {**met, "verdict": self._decided(met["not_measured"])}

        return self._calls.agree("watch()", checked, judged)

    def _decided(self, why: str) -> Plain | None:
        if not why or self._opening.not_measured or self._leader is None:
            return None
        return self._rules.unmeasured(self._leader, why)
