"""One rank's running parts, put together: what `Stride` is made of."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from evenstride.core.fleet import Shares
from evenstride.core.sampling.draw import Draw
from evenstride.errors import ConfigError, LoaderBusy
from evenstride.runtime.batch_norm.norm_context import RankContext
from evenstride.runtime.batch_norm.norm_layers import batch_norms, check_convertible, convert
from evenstride.runtime.coordination.agreement import Plain, agree, named
from evenstride.runtime.coordination.continuity import Continuity
from evenstride.runtime.coordination.control_plane import Local
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.engines.fsdp import is_sharded
from evenstride.runtime.engines.process_groups import own_group
from evenstride.runtime.engines.watched_model import WatchedModels
from evenstride.runtime.environment import USUAL_SILENT_S, Environment
from evenstride.runtime.failures.heartbeat import ending_exception
from evenstride.runtime.failures.peer_link import PeerLink
from evenstride.runtime.failures.survivors import survivors_of, watched
from evenstride.runtime.host.host_load import loads_for
from evenstride.runtime.loading.batch_change import turns_of
from evenstride.runtime.loading.calibration import calibration
from evenstride.runtime.loading.evaluation import Evaluation
from evenstride.runtime.loading.loader import Rank, TrainLoader
from evenstride.runtime.loading.loader_agreement import (
    check_loader,
    equal,
    judge_loader,
    layout,
    order_of,
)
from evenstride.runtime.loading.loader_options import (
    DataLoaderOptions,
    LoaderOptions,
    check_options,
    dataset_length,
)
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.loading.sample_costs import CostFn, Costs
from evenstride.runtime.loss.loss_convention import Convention
from evenstride.runtime.loss.loss_scaling import LossScaling
from evenstride.runtime.loss.token_weights import WeightExchange
from evenstride.runtime.memory.oom_retry import guarded
from evenstride.runtime.memory.peak_report import PeakReport
from evenstride.runtime.noise.noise_meter import meter_of, told_by
from evenstride.runtime.noise.noise_summary import noise_summary
from evenstride.runtime.settings import Settings
from evenstride.runtime.store.store_mean import Call, exact_mean, sum_over_ranks
from evenstride.runtime.synchronisation.mode_checks import (
    check_unaligned_mean,
    check_unaligned_norm,
    refuse_weights,
)
from evenstride.runtime.synchronisation.mode_runtime import (
    facts_of,
    free_of,
    sampler_of,
    synchroniser,
)
from evenstride.runtime.team import Team
from evenstride.runtime.telemetry.run_facts import (
    check_metric,
    tell_metric,
    tell_pass,
    tell_workload,
)
from evenstride.runtime.telemetry.summary import Summary, summarise
from evenstride.runtime.timing.recorder import Recorder
from evenstride.runtime.timing.step_timer import StepTimer


class RankSession:
    """One member of the team, with its clock, gate, control thread and position."""

    def __init__(self, team: Team, settings: Settings, environment: Environment) -> None:
        self._team, self._settings, self._environment = team, settings, environment
        self._recorder = Recorder(team.rank, self._ask, loads_for(settings.decides))
        self.progress = _start_of(settings)
        self.scaling = self._weighed(team, settings)
        self._weights: WeightExchange | None = None
        self._contexts: list[RankContext] = []
        # Weak, because a loader in a reference cycle takes its workers down slowly (5 s each).
        self._loader: Callable[[], TrainLoader | None] = lambda: None
        self._meetings, self._closed, self._calling = 0, False, ""
        self._gate = self._gated(team, settings)
        self._holding = PeakReport(
            self.scaling, team.rank, team.neighbours, lambda: self.progress.step
        )
        self.continuity = Continuity(
            self._ask,
            team.rank,
            team.peers,
            team.leader,
            lambda: self._gate.failed,
            environment.notices or "auto",
        )
        sync = synchroniser(
            settings.mode,
            team,
            lambda: self._gate.error,
            lambda: self.timer,
            self.progress,
            settings.max_steps,
        )
        self.scaling.synchronise_with(sync)
        self._free = free_of(self.scaling.sync)
        self.survivors = survivors_of(self._free, team.shares, lambda: self._gate.error)
        """Who is there, in modes in which the others go on without a worker that is lost."""
        self.eval_loader = Evaluation(self, team.rank, settings).loader
        """Returns a loader for evaluation; see `Stride.loader`."""
        self._watching = WatchedModels(self, team, self._holding, settings, environment)
        self._bond = self._tied(team, environment)
        self._turns = turns_of(self.progress, self.scaling, self._bond.turn, settings)
        if team.opening and not settings.mode.lockstep:
            self._skip_opening()

    def _weighed(self, team: Team, settings: Settings) -> LossScaling:
        scaling = LossScaling(
            team.world_size,
            StepTimer(self._recorder),
            self._commit,
            self._weight_exchange,
            by_hand=settings.engine == "none",
            convention=self._convention(team, settings),
            limits=team.limits(settings),
        )
        scaling.noise = meter_of(settings.noise_every, team.world_size, lambda: self.timer)
        return scaling

    def _gated(self, team: Team, settings: Settings) -> DrawBarrier:
        return DrawBarrier(
            team.shares,
            blocking=team.opening and settings.mode.lockstep,
            timeout_s=team.channel.timeout.total_seconds() if team.channel else 0.0,
            ask=self._ask if team.leader else lambda: None,
        )

    def _convention(self, team: Team, settings: Settings) -> Convention | None:
        if team.world_size == 1:
            return None
        agree = self._met if settings.mode.lockstep else None
        return Convention(team.world_size, team.rank, agree, lambda: self.scaling.draw is not None)

    def _tied(self, team: Team, environment: Environment) -> PeerLink:
        free, silent_s = self._free, environment.silent_s
        local = Local(
            self._gate,
            self._recorder,
            lambda: self.progress.now if free is None else self.progress.steps_alone,
            self.continuity.saves,
            self._holding.take,
            self.continuity.notified.told,
            partial(told_by, self.scaling.noise),
        )
        if free is None:
            return PeerLink(local, team, self._at, silent_s)
        return PeerLink(local, team, self._at, silent_s or USUAL_SILENT_S, free.lost)

    def _at(self) -> tuple[str, int]:
        phase, step = self.timer.at
        if self._free is not None and self._free.waits:
            return "sync", step
        if phase == "data" and self._gate.waiting:
            return "decision", step + 1
        left = phase != "sync" and self.timer.left
        return self._calling or ("left" if left else phase), step

    @property
    def timer(self) -> StepTimer:
        """The clock of this rank's steps."""
        return self.scaling.timer

    @property
    def seed_to_compare(self) -> int | None:
        """The seed of samples that are compared with other ranks'; ``None`` if there are none."""
        return self._settings.seed if self._team.world_size > 1 else None

    def train_loader(
        self,
        dataset: Any,
        asked: LoaderOptions,
        options: DataLoaderOptions,
        cost_fn: CostFn | None = None,
    ) -> TrainLoader:
        """Return the training loader; see `Stride.loader`."""
        costs: list[Costs] = []
        processes = options.get("num_workers", 0)

        def show() -> Plain:
            check_options(options)
            self._refuse_second_loader()
            batch = self.progress.global_batch
            check_loader(dataset, asked, self._settings, batch, by_cost=cost_fn is not None)
            if cost_fn is not None:
                costs.append(Costs(cost_fn, dataset_length(dataset)))
            shown = layout(dataset, asked, processes, self.seed_to_compare)
            return {**shown, "cost_fn": costs[0].digest() if costs else None}

        verdict = self.agree("loader()", show, judge_loader)
        left = 0 if asked.drop_last else verdict["length"] % self.progress.global_batch
        self.scaling.fit.lay_out(verdict["micro"], left, by_cost=cost_fn is not None)
        if verdict["cold_prefetch"]:
            self._skip_opening()
        self.scaling.cut(micro=any(size is not None for size in verdict["micro"]))
        if verdict["weighted"]:
            self._weight_exchange()
        self.progress.attach(order_of(dataset, verdict, asked, self._settings.seed))
        sizes = calibration(
            self._environment.calibrate, self._team.world_size, self._settings.global_batch
        )
        asked = replace(asked, sizes=sizes, costs=costs[0] if costs else None)
        if (former := self._loader()) is not None:
            former.retire()
        loader = TrainLoader(self._rank(), dataset, asked, options)
        self._loader = weakref.ref(loader)
        return loader

    def _rank(self) -> Rank:
        return Rank(
            gate=self._gate,
            scaling=self.scaling,
            progress=self.progress,
            rank=self._team.rank,
            max_steps=self._settings.max_steps,
            tick=self._tick if self._team.leader is not None else None,
            explain_failure=self._bond.explain_failure,
            sampler=sampler_of(self._free),
            turns=self._turns,
        )

    def _refuse_second_loader(self) -> None:
        loader, progress = self._loader(), self.progress
        if loader is None:
            return
        between_epochs = progress.earlier + progress.step > 0 and not progress.position
        if loader.busy or not between_epochs:
            raise ConfigError(
                "this Stride has a training loader already, and stride.epoch counts its "
                "epochs; use train=False for evaluation, make another Stride, or, for other data, "
                "make the loader between two epochs"
            )

    def begin_evaluation(self) -> Iterator[nn.Module]:
        """Return the models whose parameters must be kept gathered in an evaluation."""
        self.scaling.note_evaluation()
        return filter(is_sharded, self.scaling.models)

    def watch(
        self, model: nn.Module, drift_check: int | None, compress: str | None, *, check_loss: bool
    ) -> None:
        """Time the model's forward pass, and know its parameters; agree that it can be trained."""
        asked = {"drift_check": drift_check, "compress": compress, "check_loss": check_loss}
        self._watching.watch(model, asked)

    def stop_measuring(self, verdict: Plain) -> None:
        """Report no steps from now on, and put the leader's decision about that in force."""
        self._recorder.ignore()
        self._bond.begin_with(self.continuity.take_up({"verdict": verdict}, self._gate))
        self._gate.skip_opening()

    def refuse_in_loop(self, call: str) -> None:
        """Raise if the training loop is running.

        Raises:
            LoaderBusy: it is.
        """
        loader = self._loader()
        if loader is not None and loader.busy:
            raise LoaderBusy(f"{call} was called inside the training loop; leave the loop first")

    def sync_batch_norm(self, net: nn.Module) -> None:
        """Give batch norm statistics over all ranks."""

        def show() -> Plain:
            check_unaligned_norm(self._settings.mode)
            check_convertible(net)
            return {"layers": len(batch_norms(net))}

        call = "sync_batch_norm()"
        self.agree(call, show, lambda shown: equal(shown, call))
        self.scaling.fit.require_even()
        group = self.own_group()
        context = RankContext(group, lambda: self.scaling.draw, lambda: self.timer.waiting())
        self._contexts.append(context)
        convert(net, context)

    def recall(self, remembered: Plain) -> None:
        """Begin with the split for workers that are known from a checkpoint; collective."""
        lead = self.continuity.recalling(self.progress.step, remembered)
        plain = self.agree("restore()", dict, lambda _: lead())
        self._bond.begin_with(self.continuity.take_up(plain, self._gate))

    def own_group(self, backend: str | None = None) -> dist.ProcessGroup | None:
        """Return another process group of the same ranks, ``None`` for one; collective."""
        with self.timer.waiting():
            return own_group(self._team.group, self._team.channel, backend)

    def guard(self) -> AbstractContextManager[None]:
        """Return a context that repeats a batch in pieces if it does not fit into memory."""
        return guarded(self.scaling, self._team.rank)

    def latest_shares(self) -> Shares:
        """Return the shares of the latest committed step, which every rank knows."""
        if self.progress.parts:
            return self.progress.parts
        return self._gate.expected(max(self.progress.step - 1, 0))

    def split(self) -> Shares:
        """Return the shares by which all ranks cut data alike, at whatever step each of them is."""
        return self.latest_shares() if self.survivors is None else self.survivors.split()

    def mean(
        self, total: float | Tensor, count: float | Tensor, name: str | None
    ) -> float | Tensor:
        """Return the exact mean over all ranks; the wait for them is not work."""
        if name is not None:
            check_metric(name, total)
        loader = self._loader()
        in_loop = loader is not None and loader.busy
        if in_loop:
            check_unaligned_mean(self._settings.mode)
        shape = tuple(total.shape) if isinstance(total, Tensor) and total.numel() > 1 else ()
        call = Call(name, shape, self.progress.step, in_loop)
        with self.timer.waiting():
            mean = exact_mean(total, count, self._summed(call))
        if name is not None:
            tell_metric(self._team.leader, name, mean, self.progress)
        return mean

    def _summed(self, call: Call) -> Callable[[Tensor], Tensor] | None:
        """Return what adds up all ranks' values; ``None`` for a rank alone."""
        if self._team.channel is None:
            return None
        if self.survivors is None:
            return lambda values: sum_over_ranks(values, call, partial(self._met, "mean()"))
        self._meetings += 1
        return partial(self.survivors.summed, self._team.channel, f"mean {self._meetings}")

    def _met(
        self, call: str, show: Callable[[], Plain], judge: Callable[[list[Plain]], Plain]
    ) -> Plain:
        """Agree as in `agree`, in a call that a rank may have left out by mistake."""
        self._calling = "agreement"
        try:
            return self.agree(call, show, judge, self._passed)
        finally:
            self._calling = ""

    def _passed(self) -> dict[int, str]:
        """Return the ranks that have gone on to a later step than this one, and where they are.

        Raises:
            EvenstrideError: the run cannot go on, above all because a rank is gone.
        """
        if self._gate.error is not None:
            raise self._gate.error
        beats = self._bond.beats().items()
        return {rank: beat.where for rank, beat in beats if beat.steps > self.progress.step}

    def load(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""
        self.refuse_in_loop("load_state_dict()")
        parts = state.get("parts") if isinstance(state, dict) else None
        if parts and len(parts) != self._team.world_size:
            raise ConfigError(
                f"the saved state is of the midst of an epoch in which {len(parts)} ranks kept to "
                f"parts of the data set, and there are {self._team.world_size}; restore it with "
                'as many ranks, save at the end of an epoch, or use loader(partition="step")'
            )
        self.progress.load(state)

    def summary(self) -> Summary:
        """Return the run so far."""
        own_s = self.scaling.own_s + self._bond.cpu_s
        leader, noise, drift = self._team.leader, self.scaling.noise, self.scaling.drift
        own_s += noise.own_s if noise is not None else 0.0
        loader, order = self._loader(), self.progress.order
        own_s += loader.own_s if loader is not None else 0.0
        dropped = order.length - self.progress.cursor.end if order is not None else 0
        return summarise(
            leader,
            rank=self._team.rank,
            epoch=self.progress.epoch,
            step=self.progress.step,
            global_batch=self.progress.global_batch,
            policy=self._settings.policy,
            not_measured=self._watching.not_measured,
            samples_dropped=dropped,
            overhead_s=own_s / max(self.progress.step, 1),
            by_epoch=order is not None and order.by_epoch,
            shards=0 if order is None else len(order.shards),
            batches_repeated=self.scaling.fit.repeated,
            fits=self.scaling.fit.learned,
            drift_checks=0 if drift is None else drift.checks,
            drifts=0 if drift is None else drift.drifts,
            noise=noise_summary(None if leader is None else leader.noise, noise),
            **facts_of(self._settings.mode, self.scaling.sync),
        )

    def close(self, *, at_exit: bool) -> None:
        """Part from the others and close the trace. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.continuity.notified.close()
        # A device that waits for a lost rank would never come to the mark.
        if not at_exit and not self._gate.failed and sys.exc_info()[1] is None:
            self.timer.settle()
        if (noise := self.scaling.noise) is not None:
            noise.close()
        if self.scaling.sync is not None:
            self.scaling.sync.close(in_order=not (at_exit and ending_exception()))
        self._bond.close(at_exit=at_exit)
        # See Channel.close: nothing of torch.distributed may be left in our reference cycles.
        self._team, self._weights = replace(self._team, group=None, channel=None), None
        self.scaling.inner_waits.close()
        self.scaling.models.clear()
        self.scaling.parameters.clear()
        if (drift := self.scaling.drift) is not None:
            drift.close()
        for context in self._contexts:
            context.close()
        if self._team.leader is not None:
            self._team.leader.close(self.summary().to_dict())
        if self._team.step_file is not None:
            self._team.step_file.close()

    def _ask(self) -> None:
        self._bond.ask()

    def _tick(self) -> None:
        step = self.progress.step
        self._bond.tick(step)
        if self._team.step_file is not None:
            self._team.step_file.write(step)

    def _commit(self, draw: Draw) -> None:
        if not self.progress.step:
            self._watching.check_first_step()
            tell_workload(self._team.leader, self.scaling.models, self.progress.order)
        if self.progress.untrained_pass:
            tell_pass(self._team.leader, self.progress)
        self.progress.commit(draw.window, draw.dealing)
        if self._free is not None:
            self.progress.follow(self._free.position)

    def agree(
        self,
        call: str,
        show: Callable[[], Plain],
        judge: Callable[[list[Plain]], Plain],
        passed: Callable[[], dict[int, str]] | None = None,
    ) -> Plain:
        """Return what the leader makes of what all ranks show; see `agreement.agree`."""
        before, self._meetings = _topic(self._meetings), self._meetings + 1
        show, judge = named(call, show, judge)
        if self._team.channel is None:
            return judge([show()])
        channel = watched(self._team.channel, self.survivors, call)
        return agree(channel, _topic(self._meetings), show, judge, call, passed, before)

    def _skip_opening(self) -> None:
        self._gate.skip_opening()
        if self._team.leader is not None:
            self._team.leader.skip_opening(self.progress.step)

    def _weight_exchange(self) -> WeightExchange:
        refuse_weights(self._settings.mode)
        if self._weights is None:
            group = self.own_group("gloo")
            self._weights = WeightExchange(group, lambda: self.timer.waiting())
        return self._weights


def _start_of(settings: Settings) -> CommittedPosition:
    return CommittedPosition(
        settings.seed,
        settings.global_batch,
        varies=settings.bounds is not None and not settings.chosen,
        adopts=settings.bounds if settings.chosen else None,
    )


def _topic(meeting: int) -> str:
    return f"call {meeting} of loader(), watch(), sync_batch_norm() or mean()"
