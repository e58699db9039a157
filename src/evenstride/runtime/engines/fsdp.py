"""What is special about FSDP2 (`fully_shard`): its waits, its islands, and what it cannot do.

DDP waits for other ranks once, after the backward pass. FSDP2 waits in every layer: it gathers
the layer's parameters before forward and again before backward, and scatters the gradients
after backward. A rank with little work is held up at each of them, so that by the clock every
rank computes for as long as the slowest. `subtract_collectives` counts these waits as waits.

Where the host blocks, with Gloo on CPU (torch 2.13):

- all-gather and reduce-scatter: inside the call, because FSDP asks for them synchronously. Both
  are objects that FSDP lets one replace (`set_custom_all_gather`, `set_custom_reduce_scatter`);
- an all-gather started by ``unshard(async_op=True)``: in ``wait()`` of the work it returned;
- HSDP's all-reduce between the islands: inside a call that cannot be replaced. But it stands
  between the reduce-scatter, which is ours, and the all-reduce hook, which is run after it.

On CUDA the host blocks in none of these. There the compute stream waits, in
``wait_for_unshard``, before a reduce-scatter whose input buffer is still in use, and at the end
of the backward pass. There the timer's marks are events on the stream that is current when they
are made, and inside a collective that is the collective's own. So a version for CUDA has to make
the same marks in other places: around those three waits, on the compute stream.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from evenstride.errors import ConfigError
from evenstride.runtime.engines.device_meshes import check_meshes
from evenstride.runtime.timing.rank_clock import RankClock

_AllReduceHook = Callable[[Tensor], None]


def subtract_collectives(model: nn.Module, clock: RankClock) -> None:
    """Count the time that FSDP2's collectives block the host as waiting, not as work.

    Call it once the model is set up: after `fully_shard`, and after any `set_custom_all_gather`,
    `set_custom_reduce_scatter` or `set_all_reduce_hook` of your own, which stay in use. A second
    call replaces the clock of the first. Changes no result, and costs about 1 us per collective.

    Args:
        model: with FSDP2 somewhere in it, or without.
        clock: gets the waits in forward, backward and evaluation.
    """
    for part in _parts(model):
        for group in _groups(part):
            if not _why_uncounted(group):
                _mark(group, clock)


def uncounted(model: nn.Module) -> str:
    """Return why the waits of FSDP2's collectives cannot be told from work; empty if they can."""
    reasons = (_why_uncounted(group) for part in _parts(model) for group in _groups(part))
    return next(filter(None, reasons), "")


def _why_uncounted(group: Any) -> str:
    if group.device.type != "cpu":
        return (
            "FSDP2 on CUDA waits for other ranks inside every layer, and evenstride cannot tell "
            "these waits from work yet"
        )
    if not hasattr(group, "_reduce_scatter_comm"):
        return "FSDP2 before torch 2.8 does not let evenstride tell its waits from work"
    return ""


def _mark(group: Any, clock: RankClock) -> None:
    """Put marks around the collectives of one parameter group.

    The setters of `FSDPModule` set these same fields, but cannot tell what they held, and refuse
    modules with several parameter groups.
    """
    spans_islands = hasattr(group.mesh_info, "replicate_process_group")
    group._all_gather_comm = _MarkedGather(_unmarked(group._all_gather_comm), clock)
    group._reduce_scatter_comm = _MarkedScatter(
        _unmarked(group._reduce_scatter_comm), clock, reduces_after=spans_islands
    )
    hook = _unmarked(group._all_reduce_hook)
    if spans_islands or hook is not None:
        group._all_reduce_hook = _MarkedHook(hook, clock, begins=not spans_islands)


def _unmarked(part: Any) -> Any:
    return part.inner if isinstance(part, _MarkedGather | _MarkedScatter | _MarkedHook) else part


class _MarkedGather:
    """An all-gather that marks its wait, wherever that is."""

    def __init__(self, inner: Any, clock: RankClock) -> None:
        self.inner, self._clock = inner, clock

    def allocate(self, *args: Any, **options: Any) -> Tensor:
        buffer: Tensor = self.inner.allocate(*args, **options)
        return buffer

    def __call__(self, *args: Any, **options: Any) -> dist.Work | None:
        self._clock.timer.wait_began()
        work: dist.Work | None = self.inner(*args, **options)
        self._clock.timer.wait_ended()
        return work if work is None else _MarkedWork(work, self._clock)


class _MarkedWork(dist.Work):
    """A collective under way, whose wait is marked. FSDP does nothing with it but wait."""

    def __init__(self, inner: dist.Work, clock: RankClock) -> None:
        super().__init__()
        self._inner, self._clock = inner, clock

    def wait(self, *args: Any, **options: Any) -> bool:
        self._clock.timer.wait_began()
        done = self._inner.wait(*args, **options)
        self._clock.timer.wait_ended()
        return done


class _MarkedScatter:
    """A reduce-scatter that marks its wait, and where an all-reduce after it begins."""

    def __init__(self, inner: Any, clock: RankClock, *, reduces_after: bool) -> None:
        self.inner, self._clock, self._reduces_after = inner, clock, reduces_after

    def allocate(self, *args: Any, **options: Any) -> Tensor:
        buffer: Tensor = self.inner.allocate(*args, **options)
        if self._reduces_after:
            self._clock.timer.wait_began()  # on an island of one rank nothing is scattered
        return buffer

    def __call__(self, *args: Any, **options: Any) -> dist.Work | None:
        self._clock.timer.wait_began()
        work: dist.Work | None = self.inner(*args, **options)
        self._clock.timer.wait_ended()
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
    """Hold back the synchronisation of a micro-batch unless it is the step's last.

    Put the forward and backward pass of every micro-batch inside, the last one's as well. Within
    a step the parameters are gathered once, in the first forward pass, and kept until the last
    backward pass: gathering anew for each micro-batch would need the same number of micro-batches
    on every rank, and hang otherwise. So a rank needs memory for all gathered parameters, as with
    ``reshard_after_forward=False``, which the model has from then on.

    Args:
        model: with FSDP2 in it.
        last: whether this is the last micro-batch of the step on this rank.

    Source:
        Accumulation in the manner of ZeRO-1 as of pytorch/pytorch#124319, for forward passes
        in unequal number.
    """
    parts = _parts(model)
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.set_reshard_after_backward(last, recurse=False)
        part.set_requires_gradient_sync(last, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_backward(True, recurse=False)
            part.set_requires_gradient_sync(True, recurse=False)


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Keep all parameters gathered inside, so that ranks may run forward unequally often.

    For evaluation, where a rank may have fewer batches than others, or none. Collective at the
    start; memory for all gathered parameters is needed meanwhile. No backward pass inside.
    """
    parts = _parts(model)
    kept = [
        (part, group, group.post_forward_mesh_info) for part in parts for group in _groups(part)
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
            # The first forward pass of all decides that the root is kept gathered.
            root = state._is_root and state._auto_reshard_after_forward
            group.post_forward_mesh_info = None if root else mesh
            # Else the next backward pass gathers ahead what ran forward here, on this rank alone.
            getattr(group.comm_ctx, "post_forward_order", []).clear()
        for part in parts:
            part.reshard()


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 is somewhere in a model."""
    return _is(model, "FSDPModule") or (
        not hasattr(model, "no_sync") and bool(_parts(model))  # quick for what is wrapped in DDP
    )


def island_of(model: nn.Module) -> tuple[int, ...]:
    """Return the global ranks that hold the shards of one replica, this rank's: its island.

    These wait for each other in every layer, and for other islands once per layer's gradient.

    Returns:
        With a mesh of one dimension all its ranks; with HSDP the ranks along the dimension that
        shards; of several groups of parameters the largest. Without FSDP2 this rank alone, which
        is 0 in a process without a group.
    """
    islands = [
        tuple(dist.get_process_group_ranks(group.mesh_info.shard_process_group))
        for part in _parts(model)
        for group in _groups(part)
        if hasattr(group.mesh_info, "shard_process_group")
    ]
    alone = (dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,)
    return max(islands, key=len, default=alone)


def check_engine(model: nn.Module, device_kinds: Sequence[str]) -> None:
    """Refuse an engine whose gradient cannot be made exact, or that cannot run on these ranks.

    Args:
        model: as it is trained.
        device_kinds: device kind of every rank that trains together, such as ``cpu`` or ``cuda``,
            in rank order.

    Raises:
        ConfigError: the model is FSDP1, `DataParallel` or DeepSpeed; it is FSDP2 over devices of
            several kinds; the work on one sample is divided over ranks; or the model averages over
            other ranks than these, or does not average.
    """
    for part in model.modules():
        _refuse_kind(part)
    kinds = sorted(set(device_kinds))
    parts = _parts(model)
    if parts and len(kinds) > 1:
        raise ConfigError(
            f"watch() got an FSDP2 model over ranks of several kinds ({', '.join(kinds)}), but its "
            "device mesh has one; use DistributedDataParallel over gloo, or ranks of one kind"
        )
    groups = [group for part in parts for group in _groups(part)]
    engines = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    check_meshes(model, groups, engines)
    for name, ranks in _averaged(model, parts):
        if ranks != len(device_kinds):
            raise ConfigError(
                f"watch() got a {name} that averages over {ranks:g} ranks, but the Stride weighs "
                f"for {len(device_kinds)}, so the gradient would be wrong by a factor; give "
                "Stride(process_group=...) the ranks that the model averages over, and leave "
                "FSDP's gradient_divide_factor as it is"
            )


def _refuse_kind(part: nn.Module) -> None:
    name = type(part).__name__
    if any(kind.__module__.partition(".")[0] == "deepspeed" for kind in type(part).__mro__):
        raise ConfigError(
            f"watch() got DeepSpeed's {name}, which scales and reduces gradients by its own "
            "rules; use DistributedDataParallel, or fully_shard (FSDP2) in place of ZeRO"
        )
    if _is(part, "FullyShardedDataParallel"):
        raise ConfigError(
            f"watch() got a {name} (FSDP1), whose waits cannot be told from its work; FSDP2 can "
            "be: use torch.distributed.fsdp.fully_shard(model)"
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
    """Yield what each engine within the model divides its summed gradients by."""
    for part in model.modules():
        if isinstance(part, DistributedDataParallel):
            yield "DistributedDataParallel", part.process_group.size()
    for part in parts:
        for group in _groups(part):
            info, ranks = group.mesh_info, 1
            for kind in ("shard_process_group", "replicate_process_group"):
                ranks *= getattr(info, kind).size() if hasattr(info, kind) else 1
            factor = getattr(group, "gradient_divide_factor", None)
            yield "fully_shard model", ranks if factor is None else factor


def _parts(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was applied to, outer before inner."""
    return [part for part in model.modules() if _is(part, "FSDPModule")]


def _is(part: nn.Module, name: str) -> bool:
    """Return whether a module is of a class of FSDP's.

    Without importing it, which takes half as long as to import torch: whoever has made such a
    module has imported it.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(part, getattr(fsdp, name))


def _groups(part: Any) -> list[Any]:
    """Return the groups of parameters that a module gathers together; a root may have none."""
    state = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]  # before torch 2.12
