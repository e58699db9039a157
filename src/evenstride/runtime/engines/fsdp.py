"""What is specific to FSDP2 (`fully_shard`): its waits, its shard groups, and what it cannot do.

DDP waits for other ranks once, after the backward pass. FSDP2 waits in every layer: it gathers the
parameters before forward and again before backward, and scatters the gradients after backward. By
the clock every rank then computes for as long as the slowest. `subtract_collectives` counts these
waits as waiting time. With Gloo on CPU (torch 2.13) the host blocks in these calls:

- All-gather and reduce-scatter block inside the call, because FSDP calls them synchronously. Both
  are objects that FSDP allows to replace (`set_custom_all_gather`, `set_custom_reduce_scatter`).
- An all-gather started by ``unshard(async_op=True)`` blocks in ``wait()`` of the returned work.
- HSDP's all-reduce between the shard groups blocks inside a call that cannot be replaced. But it
  runs between the reduce-scatter, which is ours, and the all-reduce hook, which runs after it.

On a device the host blocks in none of these. There the compute stream waits, and `StallMarks` marks
its waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from evenstride.errors import ConfigError
from evenstride.runtime.engines.divided_models import check_divided
from evenstride.runtime.engines.fsdp_source import NEWEST, moved
from evenstride.runtime.engines.fsdp_stalls import StallMarks, unmarkable
from evenstride.runtime.engines.watched_models import fsdp_parts, is_of_fsdp
from evenstride.runtime.timing.device_timer import RankClock

_AllReduceHook = Callable[[Tensor], None]


def subtract_collectives(model: nn.Module, clock: RankClock) -> None:
    """Count the time in which FSDP2's collectives block host or device as waiting, not as work.

    Call it after `fully_shard`, and after any `set_custom_all_gather`, `set_custom_reduce_scatter`
    or `set_all_reduce_hook` of the user, which stay in use. A second call replaces the clock of
    the first. Changes no result. Costs about 1 us per collective on a CPU; on a device, the marks
    aim at 0.3 % of the time or less.
    """
    stalls = StallMarks(clock)
    for part in fsdp_parts(model):
        for group in parameter_groups(part):
            if why_uncounted(group):
                continue
            if group.device.type == "cpu":
                _mark(group, clock)
            else:
                stalls.watch(group)
                stalls.watch_end(part._get_fsdp_state())


def uncounted(model: nn.Module) -> str:
    """Return why waits of FSDP2's collectives cannot be separated from work; empty if they can."""
    groups = (group for part in fsdp_parts(model) for group in parameter_groups(part))
    reasons = map(why_uncounted, groups)
    return next(filter(None, reasons), "")


def why_uncounted(group: Any) -> str:
    """Return why waits of a parameter group cannot be separated from work; empty if they can."""
    on_cpu = group.device.type == "cpu"
    if on_cpu and not hasattr(group, "_reduce_scatter_comm"):
        return (
            "FSDP2 before torch 2.9 does not let evenstride separate its waits from work on a CPU"
        )
    # On a CPU, the host blocks in collectives, and streams do not matter.
    changed = moved(collectives_only=True) if on_cpu else unmarkable(group)
    if not changed:
        return ""
    return (
        f"FSDP2 of torch {torch.__version__} differs from the releases in which evenstride can "
        f"separate waits from work ({changed}); use a newer evenstride, or torch {NEWEST} or older"
    )


def _mark(group: Any, clock: RankClock) -> None:
    spans_islands = hasattr(group.mesh_info, "replicate_process_group")
    # `FSDPModule` has setters for these fields, but they cannot return the old values, and they
    # refuse modules with several parameter groups.
    group._all_gather_comm = _MarkedGather(_unmarked(group._all_gather_comm), clock)
    group._reduce_scatter_comm = _MarkedScatter(
        _unmarked(group._reduce_scatter_comm), clock, reduces_after=spans_islands
    )
    hook = _unmarked(group._all_reduce_hook)
    if spans_islands or hook is not None:
        group._all_reduce_hook = _MarkedHook(hook, clock, begins=not spans_islands)


# A second call of `subtract_collectives` must not wrap what the first one has wrapped.
def _unmarked(part: Any) -> Any:
    return part.inner if isinstance(part, _MarkedGather | _MarkedScatter | _MarkedHook) else part


class _MarkedGather:
    def __init__(self, inner: Any, clock: RankClock) -> None:
        self.inner, self._clock = inner, clock

    def allocate(self, *args: Any, **options: Any) -> Tensor:
        buffer: Tensor = self.inner.allocate(*args, **options)
        return buffer

    def __call__(self, *args: Any, **options: Any) -> dist.Work | None:
        with self._clock.waiting():
            work: dist.Work | None = self.inner(*args, **options)
        return work if work is None else _MarkedWork(work, self._clock)


class _MarkedWork(dist.Work):
    """A running collective whose wait is marked. FSDP only ever waits for it."""

    def __init__(self, inner: dist.Work, clock: RankClock) -> None:
        super().__init__()
        self._inner, self._clock = inner, clock

    def wait(self, *args: Any, **options: Any) -> bool:
        with self._clock.waiting():
            return self._inner.wait(*args, **options)


class _MarkedScatter:
    def __init__(self, inner: Any, clock: RankClock, *, reduces_after: bool) -> None:
        self.inner, self._clock, self._reduces_after = inner, clock, reduces_after

    def allocate(self, *args: Any, **options: Any) -> Tensor:
        buffer: Tensor = self.inner.allocate(*args, **options)
        if self._reduces_after:
            self._clock.timer.wait_began()  # in a shard group of one rank nothing is scattered
        return buffer

    def __call__(self, *args: Any, **options: Any) -> dist.Work | None:
        with self._clock.waiting():
            work: dist.Work | None = self.inner(*args, **options)
        if self._reduces_after:
            self._clock.timer.wait_began()
        return work


class _MarkedHook:
    """The end of HSDP's all-reduce, or a hook that reduces by itself; both are waits."""

    def __init__(self, inner: _AllReduceHook | None, clock: RankClock, *, begins: bool) -> None:
        self.inner, self._clock, self._begins = inner, clock, begins

    def __call__(self, reduced: Tensor) -> None:
        if self._begins:
            self._clock.timer.wait_began()
        if self.inner is not None:
            self.inner(reduced)
        self._clock.timer.wait_ended()


@contextlib.contextmanager
def held_back(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Postpone the synchronisation of a micro-batch unless it is the step's last.

    Put the forward and backward pass of every micro-batch inside, including the last one's.
    Parameters are gathered once per step and kept until the last backward pass. Gathering them for
    each micro-batch would hang unless all ranks had equally many. So a rank needs memory for all
    gathered parameters, and the model has ``reshard_after_forward=False`` from then on.

    Accumulation in the manner of ZeRO-1 as of pytorch/pytorch#124319, for unequal numbers of
    forward passes.
    """
    parts = fsdp_parts(model)
    # Each part is set by itself, because the setters' recursion would meet a part several times.
    for part in parts:
        _keep_gathered(part)
        part.set_reshard_after_backward(last, recurse=False)
        part.set_requires_gradient_sync(last, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_backward(True, recurse=False)
            part.set_requires_gradient_sync(True, recurse=False)


def _keep_gathered(part: Any) -> None:
    if hasattr(part, "set_reshard_after_forward"):
        part.set_reshard_after_forward(False, recurse=False)
        return
    for group in parameter_groups(part):  # before torch 2.8
        group.post_forward_mesh_info = None


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Keep all parameters gathered inside, so that ranks may run forward unequally often.

    For evaluation: collective at the start, and without a backward pass inside.
    """
    parts = fsdp_parts(model)
    kept = [
        (part, group, group.post_forward_mesh_info)
        for part in parts
        for group in parameter_groups(part)
    ]
    for part in parts:
        part.unshard()
    for _, group, _ in kept:
        group.post_forward_mesh_info = None
    try:
        yield
    finally:
        for part, group, mesh in kept:
            state = part._get_fsdp_state()
            # The first of all forward passes decides that the root is kept gathered.
            root = state._is_root and getattr(state, "_auto_reshard_after_forward", True)
            group.post_forward_mesh_info = None if root else mesh
            # Otherwise the next backward pass would prefetch by this rank's own forward order.
            getattr(group.comm_ctx, "post_forward_order", []).clear()
        for part in parts:
            part.reshard()


def island_of(model: nn.Module) -> tuple[int, ...]:
    """Return this rank's shard group: the global ranks that together hold one copy of parameters.

    They wait for each other in every layer, and for other shard groups once per layer's gradient.
    With a mesh of one dimension these are all its ranks. With HSDP they are the ranks along the
    sharding dimension. Of several parameter groups the largest counts. Without FSDP2 it is this
    rank alone.
    """
    islands = [
        tuple(dist.get_process_group_ranks(group.mesh_info.shard_process_group))
        for part in fsdp_parts(model)
        for group in parameter_groups(part)
        if hasattr(group.mesh_info, "shard_process_group")
    ]
    alone = (dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,)
    return max(islands, key=len, default=alone)


def check_engine(model: nn.Module, device_kinds: Sequence[str]) -> None:
    """Refuse an engine whose gradient cannot be made exact, or that cannot run on these ranks.

    These are FSDP1, `DataParallel`, the engines of DeepSpeed and Megatron, FSDP2 over devices of
    different kinds, and work on one sample divided over ranks. Also refused is a model that
    averages over other ranks, or not at all. ``device_kinds`` are those of every rank that trains
    together, in rank order.
    """
    for part in model.modules():
        _refuse_kind(part)
    kinds = sorted(set(device_kinds))
    parts = fsdp_parts(model)
    if parts and len(kinds) > 1:
        raise ConfigError(
            f"watch() got an FSDP2 model over ranks with different devices ({', '.join(kinds)}), "
            "but its device mesh has one type; use DistributedDataParallel over gloo, or one type "
            "of device"
        )
    groups = [group for part in parts for group in parameter_groups(part)]
    engines = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    check_divided(model, groups, engines, [_members(group) for group in groups])
    # The loss is weighted by the number of ranks of the Stride.
    for name, ranks in _averaged(model, parts):
        if ranks != len(device_kinds):
            raise ConfigError(
                f"watch() got a {name} that averages over {ranks:g} ranks, but the Stride has "
                f"{len(device_kinds)} ranks, so the gradient would be wrong by a factor; give "
                "Stride(process_group=...) the ranks that the model averages over, and leave "
                "FSDP's gradient_divide_factor unset. Tensor, context, expert and pipeline "
                "parallelism over the other ranks are not supported"
            )


def _refuse_kind(part: nn.Module) -> None:
    name = type(part).__name__
    libraries = {kind.__module__.partition(".")[0] for kind in type(part).__mro__}
    if "megatron" in libraries and hasattr(part, "finish_grad_sync"):
        raise ConfigError(
            f"watch() got Megatron's {name}, whose schedule averages gradients after the backward "
            "pass, where evenstride cannot time it; use torch's DistributedDataParallel, or "
            "fully_shard (FSDP2)"
        )
    if "deepspeed" in libraries:
        raise ConfigError(
            f"watch() got DeepSpeed's {name}, which scales and reduces gradients by its own "
            "rules; use DistributedDataParallel, or fully_shard (FSDP2) instead of ZeRO"
        )
    if is_of_fsdp(part, "FullyShardedDataParallel"):
        raise ConfigError(
            f"watch() got a {name} (FSDP1), whose waits cannot be separated from its work; use "
            "FSDP2: torch.distributed.fsdp.fully_shard(model)"
        )
    if isinstance(part, DataParallel):
        raise ConfigError(
            f"watch() got an nn.{name}, which splits each batch evenly over the devices of one "
            "process; start one process per device and use DistributedDataParallel"
        )
    if getattr(part, "_use_python_reducer", False):
        raise ConfigError(
            f"watch() got a {name} with torch._dynamo.config.optimize_ddp='python_reducer', which "
            "waits for other ranks inside a compiled backward pass; leave that setting and "
            "compiled autograd off"
        )


def _averaged(model: nn.Module, parts: list[Any]) -> Iterator[tuple[str, float]]:
    """Yield the divisor that each engine in the model applies to its summed gradients."""
    for part in model.modules():
        if isinstance(part, DistributedDataParallel):
            yield "DistributedDataParallel", part.process_group.size()
    for part in parts:
        for group in parameter_groups(part):
            # The user's own divisor must fit, too: either may make the gradient wrong.
            ranks, factor = _members(group), getattr(group, "gradient_divide_factor", None)
            yield "fully_shard model", ranks
            yield "fully_shard model", ranks if factor is None else factor


def _members(group: Any) -> int:
    """Return the number of ranks whose gradients a parameter group adds up."""
    info, ranks = group.mesh_info, 1
    for kind in ("shard_process_group", "replicate_process_group"):
        ranks *= getattr(info, kind).size() if hasattr(info, kind) else 1
    return ranks


def parameter_groups(part: Any) -> list[Any]:
    """Return the groups of parameters that a module gathers together; a root may have none."""
    state = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]  # before torch 2.12
