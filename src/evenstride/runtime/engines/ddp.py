"""What is specific to DDP: its waits outside the end of a backward pass, and its hook.

Before the module's own forward pass DDP broadcasts the buffers; `watch_forward` counts that as
waiting.

``torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`` runs a backward pass of its own
inside the script's. If the last gradient of the step comes from there, DDP waits when the inner
pass ends. The mark at the end of the outer pass comes after that wait, which would then count as
work. Callbacks of a pass run in queue order, and a parameter's own hook runs before DDP's. So a
hook on the parameter whose gradient comes last queues a mark before DDP's wait. The first step
shows which parameter that is; later steps call one hook per model.

Gradients can be sent as bfloat16, also over Gloo, for which torch's own hook raises.
"""

# No postponed annotations here: torch compares those of a communication hook with its own types.

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from evenstride.errors import ConfigError
from evenstride.runtime.engines.watched_models import engine_of
from evenstride.runtime.timing.device_timer import RankClock

COMPRESSIONS = ("bf16",)
_BROADCAST = "_evenstride_broadcast"


def watch_forward(model: nn.Module, clock: RankClock) -> None:
    """Count what DDP does before the module's own forward pass as waiting."""
    engine = engine_of(model)
    if not isinstance(engine, DistributedDataParallel):
        return
    if not (engine.broadcast_buffers and any(True for _ in engine.module.buffers())):
        return  # no buffers to synchronise, and hooks would slow down every forward pass

    def outer(*_: Any) -> None:
        clock.timer.wait_began()  # DDP broadcasts buffers now, which makes a fast rank look slow
        # Not in evaluation, where a rank without a batch would never reach the broadcast.
        if not engine.training:
            engine.require_forward_param_sync = False  # DDP sets it after each forward pass

    def inner(*_: Any) -> None:
        clock.timer.wait_ended()
        setattr(engine, _BROADCAST, engine.training)

    def after(*_: Any) -> None:
        setattr(engine, _BROADCAST, False)

    # Compiled hooks would record events inside the graph, which goes wrong on CUDA.
    eager: Any = torch.compiler.disable
    engine.register_forward_pre_hook(eager(outer))
    engine.module.register_forward_pre_hook(eager(inner), prepend=True)
    engine.register_forward_hook(eager(after))


def reforward(model: nn.Module) -> None:
    """Prepare for another forward pass in place of a failed one."""
    engine = engine_of(model)
    # DDP broadcasts buffers once per step, and had done so when the module's own pass began. The
    # other ranks would not take part again.
    if getattr(engine, _BROADCAST, False) and isinstance(engine, DistributedDataParallel):
        engine.require_forward_param_sync = False
        setattr(engine, _BROADCAST, False)


class _ModelHooks:
    def __init__(self) -> None:
        self.handles: dict[Tensor, RemovableHandle] = {}
        self.last: Tensor | None = None  # whose gradient was accumulated last

    def accumulated(self, parameter: Tensor) -> None:
        self.last = parameter

    def remove(self) -> None:
        self.last = None
        self.keep_last()

    def keep_last(self) -> None:
        """Remove all hooks except that of the parameter that came last."""
        for parameter in [p for p in self.handles if p is not self.last]:
            self.handles.pop(parameter).remove()


class InnerWaits:
    """Marks the waits of DDP models inside reentrant backward passes."""

    def __init__(self, clock: RankClock) -> None:
        self._clock = clock
        self._models: list[_ModelHooks] = []
        self._learning: list[_ModelHooks] = []
        self._outer = self._marked = -1  # passes: that of the loss, and the latest inner one

    def watch(self, engine: DistributedDataParallel) -> None:
        ignored = getattr(engine, "parameters_to_ignore", ())
        model = _ModelHooks()
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad and name not in ignored:
                hook = partial(self._accumulated, model)
                register: Any = parameter.register_post_accumulate_grad_hook
                model.handles[parameter] = register(hook)
        self._models.append(model)
        self._learning.append(model)

    def backward_began(self) -> None:
        """Note the pass to which the loss belongs. Call it inside that pass."""
        self._outer = torch._C._current_graph_task_id()

    def gradients_ready(self) -> None:
        """Note that a synchronising backward pass has reached its last gradient."""
        if self._learning:
            for model in self._learning:
                if model.last is not None:
                    model.keep_last()
            self._learning = [model for model in self._learning if model.last is None]

    def close(self) -> None:
        for model in self._models:
            model.remove()
        self._models.clear()
        self._learning.clear()

    def _accumulated(self, model: _ModelHooks, parameter: Tensor) -> None:
        model.accumulated(parameter)
        inner = torch._C._current_graph_task_id()
        if inner not in (self._outer, self._marked):
            self._marked = inner
            Variable._execution_engine.queue_callback(self._wait_began)

    def _wait_began(self) -> None:
        self._clock.timer.wait_began()
        Variable._execution_engine.queue_callback(self._clock.timer.wait_ended)


def check_compression(model: nn.Module, compress: str | None) -> None:
    """Raise `ConfigError` unless the model's gradients can be sent in the given format."""
    if compress is None:
        return
    if compress not in COMPRESSIONS:
        raise ConfigError(
            f"compress is {compress!r}; it must be one of {', '.join(map(repr, COMPRESSIONS))}, or "
            "None to send gradients unchanged"
        )
    if not isinstance(engine_of(model), DistributedDataParallel):
        raise ConfigError(
            f"compress={compress!r} works for DistributedDataParallel, not for a "
            f"{type(engine_of(model)).__name__}; leave it out (FSDP2 has MixedPrecisionPolicy)"
        )


def send_compressed(model: nn.Module) -> None:
    """Let DDP send its gradients in half the bytes, rounded to 8 bits and summed in bfloat16."""
    engine: Any = engine_of(model)
    try:
        engine.register_comm_hook(engine.process_group, as_bf16)
    except RuntimeError as error:
        raise ConfigError(
            f"compress='bf16' needs the model's communication hook, but torch refuses it: {error}; "
            "use one of the two"
        ) from error


def as_bf16(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch reads both annotations
) -> torch.futures.Future[Tensor]:
    """Average a bucket over the ranks in bfloat16; a DDP communication hook.

    Every rank gets the same bytes, so replicas stay equal.
    """
    whole = bucket.buffer()
    small = whole.to(torch.bfloat16).div_(dist.get_world_size(group))
    work = dist.all_reduce(small, group=group, async_op=True)
    assert work is not None, "this rank is in the group"

    def back(_: Any) -> Tensor:
        copied: Tensor = whole.copy_(small)
        return copied

    returned: torch.futures.Future[Tensor] = work.get_future().then(back)
    return returned
