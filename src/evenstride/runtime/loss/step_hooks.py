"""Hooks on backward passes and optimizer steps, which detect the end of a step.

A backward pass has two marks: when this rank's last gradient is ready, and when all ranks'
gradients are averaged. An optimizer's step ends the step, and in some modes synchronises it.

A `torch.amp.GradScaler` does not call the optimizer if a gradient is not finite, and torch has no
hook for that. All ranks skip the same steps: the reduced gradient is bitwise equal on all ranks,
and for sharded gradients (FSDP2) torch takes the maximum of the ranks' findings. Every loop calls
the scaler's ``update`` in the end, so the hook is there.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from evenstride.core.sampling.draw import Draw
from evenstride.runtime import usage_errors
from evenstride.runtime.engines.ddp import InnerWaits
from evenstride.runtime.engines.divided_models import (
    check_stages,
    context_parallel,
    in_context_parallel,
)
from evenstride.runtime.engines.watched_models import WatchedModels
from evenstride.runtime.loss.batch_in_hand import BatchInHand, StepEvent
from evenstride.runtime.noise.noise_meter import NoiseMeter
from evenstride.runtime.synchronisation.synchroniser import Synchroniser
from evenstride.runtime.timing.device_timer import RankClock

# Number of micro-batches after which gradients are compared: a loop that clips does so each time.
_COMPARISONS = 2

_hooks: OrderedDict[int, Callable[[], None]] = OrderedDict()


class BackwardHooks:
    """Follows the backward passes of the current batch, and ends the step."""

    def __init__(
        self,
        clock: RankClock,
        batch: BatchInHand,
        watched: WatchedModels,
        inner_waits: InnerWaits,
        noise: NoiseMeter | None,
        commit: Callable[[Draw], None],  # called after the synchronisation of a step
        add_up: Callable[[Draw], None] | None,  # sums gradients of all ranks, without an engine
        *,
        by_engine: bool,  # averaged in the backward pass, not at the optimizer's step
    ) -> None:
        self._clock, self._batch, self._watched = clock, batch, watched
        self._inner_waits, self._noise, self._commit = inner_waits, noise, commit
        self._add_up, self._by_engine = add_up, by_engine
        self.own_s = 0.0
        self.commits = 0
        """Number of committed steps."""
        self._begun = False  # whether a batch has come
        self._queued = False  # whether the engine has our callback for the running pass
        self._gave = False  # whether the latest backward pass has left gradients
        self._comparisons = _COMPARISONS  # remaining comparisons between micro-batches
        self._left: list[tuple[Tensor, int]] = []  # gradients and their versions, to compare

    def batch_came(self) -> None:
        """Refuse a pipeline of which a watched model has become a part before the first batch."""
        if not self._begun:
            self._begun = True
            check_stages(self._watched.models)

    def follow(self, scaled: Tensor) -> None:
        """Mark the backward pass of a scaled loss."""
        self._queued = False  # a backward pass that raised never reached the callback
        if scaled.grad_fn is not None:  # a hook on the tensor costs half as much again
            scaled.grad_fn.register_prehook(self._began)
        elif scaled.requires_grad:
            scaled.register_hook(self._began)  # type: ignore[no-untyped-call]

    def check_gradients(self, draw: Draw) -> None:
        """Raise `UsageError` if the gradients of an earlier micro-batch of the step are gone."""
        if self._gave and not draw.first and self._watched.without_gradients:
            raise usage_errors.gradients_gone(draw.step)
        if self._left:
            self._compare_gradients(draw)

    def synchronised(self) -> None:
        """Note that the gradients of all ranks are averaged, which commits the step."""
        timer, batch = self._clock.timer, self._batch
        draw = batch.draw
        if self._add_up is not None and draw is not None:
            self._add_up(draw)
        started_s = timer.now()
        timer.synchronised()
        if draw is not None and not batch.committed:
            batch.happened(StepEvent.SYNCHRONISE)
            self._watched.recorded()
            self.commits += 1
            if self._noise is not None:
                self._noise.committed()
            self._commit(draw)
        self.own_s += timer.now() - started_s

    def _began(self, _: object) -> None:
        # Callbacks run in queue order, after the whole graph. Ours runs before the engine waits
        # for other ranks; a callback queued from inside ours runs after that wait.
        if not self._queued and self._batch.draw is not None:
            if _in_compiled_autograd():
                raise usage_errors.compiled_backward()
            self._queued = True
            self._batch.happened(StepEvent.BACKWARD_BEGINS)
            self._inner_waits.backward_began()
            Variable._execution_engine.queue_callback(self._gradients_ready)
            if self._noise is not None:
                self._noise.backward_began()

    def _gradients_ready(self) -> None:
        timer, batch, watched = self._clock.timer, self._batch, self._watched
        started_s, self._queued = timer.now(), False
        draw = batch.draw
        if draw is None:
            return
        batch.happened(StepEvent.GRADIENTS_READY)
        if not (draw.first and draw.last):
            # FSDP2 keeps gradients that are not reduced yet elsewhere, so there may be none.
            self._gave = any(p.grad is not None for p in watched.parameters)
        if draw.last and self._by_engine:  # otherwise at the optimizer's step
            timer.gradients_ready()
            self._inner_waits.gradients_ready()
            Variable._execution_engine.queue_callback(self.synchronised)
        elif self._comparisons and not draw.last:
            given = [p.grad for p in watched.parameters if p.grad is not None]
            # Torch counts in-place changes of a tensor, which costs less than a copy.
            self._left = [(gradient, gradient._version) for gradient in given]
        self.own_s += timer.now() - started_s

    def _compare_gradients(self, draw: Draw) -> None:
        changed = any(gradient._version != version for gradient, version in self._left)
        self._left = []
        if not draw.first:
            self._comparisons -= 1
            if changed:
                self._comparisons = 0
                usage_errors.tell_of_changed_gradients(draw.step)


def refuse_inside(*, capturing: bool) -> None:
    """Raise if a loss is scaled where its backward pass cannot be weighted or timed."""
    if capturing:
        raise usage_errors.captured()
    if in_context_parallel():
        raise context_parallel()
    # DDP would fail in the backward pass, and advise a setting that `watch` refuses.
    if _in_compiled_autograd():
        raise usage_errors.compiled_backward()


def _in_compiled_autograd() -> bool:
    """Return whether a backward pass that begins now would be compiled."""
    # By name, because the import is slow and hardly any script needs it.
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is None:
        return False
    return bool(getattr(compiled, "in_compiled_autograd_region", False)) or bool(
        getattr(compiled, "compiled_autograd_enabled", False)
    )


class OptimizerHooks:
    """Receives every step that an optimizer takes or a gradient scaler skips."""

    def __init__(
        self,
        clock: RankClock,
        batch: BatchInHand,
        watched: WatchedModels,
        backward: BackwardHooks,
        sync: Synchroniser | None,  # replaces the engine's averaging, if given
    ) -> None:
        self._clock, self._batch, self._watched = clock, batch, watched
        self._backward, self._sync = backward, sync
        self._syncing = False  # whether the synchronisation has begun but not finished

    def listen(self) -> tuple[RemovableHandle, ...]:
        """Receive every step of this process, until the handles are removed."""
        return (
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
            # For the steps that a gradient scaler skips.
            register_scaler_update_hook(self.after_step),
        )

    def before_step(self, optimizer: Optimizer, args: Any = (), named: Any = None) -> None:
        """Synchronise if that is due now; refuse a step with part of a gradient."""
        sync, draw = self._sync, self._batch.draw
        if self._batch.synced and sync is None:
            return
        # Torch reports every optimizer of the process, including those of unwatched models.
        ours = {id(p) for p in self._watched.parameters}
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            return
        # A step now would use only part of the gradient.
        if not self._batch.synced:
            raise usage_errors.stepped_in_midst(draw and draw.step)
        if sync is not None and draw is not None:  # otherwise torch steps to create a state
            # A closure runs backward passes of its own inside the step, after the exchange.
            if any(given is not None for given in (*args[1:], *(named or {}).values())):
                raise usage_errors.stepped_by_closure()
            self._synchronise(sync, optimizer)

    def after_step(self, optimizer: Any = None, *_: Any) -> None:
        """Note that an optimizer has stepped; without one, that a scaler has ended a step."""
        sync = self._sync
        left_out = optimizer is None and self._batch.failed and not self._syncing
        if sync is not None and left_out and not hasattr(sync, "takes_left_out"):
            raise usage_errors.left_out()
        if sync is not None and (self._syncing or left_out):
            sync.after_step(optimizer)
            self._syncing = False
            if not self._batch.committed:
                self._backward.synchronised()
        scaler = optimizer is None
        self._batch.happened(StepEvent.SCALER_UPDATES if scaler else StepEvent.OPTIMIZER_STEPS)

    def check_stepped(self) -> None:
        """Raise `UsageError` if the current step waits for an optimizer's step that never came."""
        if self._sync is not None and self._batch.failed and not self._syncing:
            step = -1 if self._batch.draw is None else self._batch.draw.step
            if self._watched.models:
                raise usage_errors.not_stepped(step)
            raise usage_errors.unwatched()

    def _synchronise(self, sync: Synchroniser, optimizer: Optimizer) -> None:
        self._syncing = True
        if self._batch.committed:  # another optimizer in the same step
            with self._clock.waiting():
                sync.before_step(optimizer)
            return
        self._clock.timer.gradients_ready()  # work since the backward pass, such as clipping
        sync.before_step(optimizer)


def register_scaler_update_hook(hook: Callable[[], None]) -> RemovableHandle:
    """Call a hook after ``update`` of any gradient scaler of this process.

    This lasts until the handle is removed. A hook is called twice if a scaler's ``update`` calls
    another's. An ``update`` is wrapped once per process and stays wrapped, which costs about 1 us
    per update.
    """
    # Classes that are defined later are covered if their ``update`` calls that of `GradScaler`.
    for kind in _kinds(torch.amp.GradScaler):
        update = vars(kind).get("update")
        if update is not None and not hasattr(update, "_evenstride_calls_hooks"):
            setattr(kind, "update", _calling_hooks(update))  # noqa: B010
    handle = RemovableHandle(_hooks)
    _hooks[handle.id] = hook
    return handle


def _calling_hooks(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def updated(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        for hook in tuple(_hooks.values()):
            hook()

    updated._evenstride_calls_hooks = True  # type: ignore[attr-defined]
    return updated


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for special in kind.__subclasses__():
        yield from _kinds(special)
