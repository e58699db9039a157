"""Trained state of the watched models, and means of gradients, weights and buffers over ranks.

Before an all-reduce, the ranks compare what they are about to send. A mismatch is thus an error
with a clear message, not a wrong sum or an endless wait.

Tensors of one dtype and device are sent as one flat tensor, up to some tens of megabytes. An
all-reduce gives every rank the same bytes, so the results are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstride.errors import ConfigError, UsageError
from evenstride.runtime.engines.watched_models import engine_of

TensorT = TypeVar("TensorT", bound=Tensor)

# Large enough for full speed of a collective, small relative to a model.
BUCKET_BYTES = 2**25


class TrainedState:
    """The parameters and buffers of models, except those that DDP ignores.

    Their order is the same on all ranks. A name is the number of the model, in the order of
    watching, and torch's own name.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, nn.Parameter] = {}
        self._modules: list[tuple[nn.Module, frozenset[str]]] = []
        self._seen: dict[str, Tensor] = {}  # buffers when they were last equal on all ranks
        self.has_buffers = False

    def watch(self, model: nn.Module) -> None:
        """Register a model whose parameters and buffers are equal on all ranks."""
        engine = engine_of(model)
        inner = getattr(engine, "module", engine)
        ignored = frozenset(getattr(engine, "parameters_to_ignore", ()))
        # Models may share parameters; each counts once.
        known = set(map(id, self.by_name.values()))
        for name, parameter in inner.named_parameters():
            if name not in ignored and id(parameter) not in known:
                self.by_name[f"{len(self._modules)}.{name}"] = parameter
        self._modules.append((inner, ignored))
        self.note_buffers()
        self.has_buffers = bool(self._seen)

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.by_name.values() if p.requires_grad]

    def of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        its = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [p for p in self.trainable if id(p) in its]

    def states_of(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the optimizer's states that have the shape of a parameter, such as momenta."""
        kept = []
        for parameter in self.of(optimizer):
            states = optimizer.state.get(parameter, {})
            # Sorted, because all ranks must send them in the same order.
            kept += [states[name] for name in sorted(states) if _alike(states[name], parameter)]
        return kept

    def changed_buffers(self) -> tuple[list[Tensor], list[bool]]:
        """Return all buffers, and whether each has changed since `note_buffers`.

        Most buffers never change, such as masks and tables. A weighted mean of equal numbers would
        change them by rounding.
        """
        named = dict(self._buffers())
        changed = [not _equal(tensor, self._seen.get(name)) for name, tensor in named.items()]
        return list(named.values()), changed

    def note_buffers(self) -> None:
        """Note that the buffers are equal on all ranks; costs a copy of them."""
        self._seen = {name: tensor.detach().clone() for name, tensor in self._buffers()}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        # Read again each time, because a forward pass may replace a buffer by another tensor.
        for number, (module, ignored) in enumerate(self._modules):
            for name, tensor in module.named_buffers():
                if name not in ignored:
                    yield f"{number}.{name}", tensor


def _equal(tensor: Tensor, seen: Tensor | None) -> bool:
    return seen is not None and tensor.shape == seen.shape and torch.equal(tensor, seen)


def _alike(state: object, parameter: Tensor) -> bool:
    return (
        isinstance(state, Tensor) and state.shape == parameter.shape and state.is_floating_point()
    )


def summed(
    tensors: Iterable[TensorT], weight: float, group: dist.ProcessGroup | None
) -> Iterator[tuple[TensorT, Tensor]]:
    """Yield each tensor with its sum over ranks, weighted by each rank's ``weight``; collective.

    The tensors are floating-point or complex, equal in number, shape and dtype on all ranks. With
    weight 0, they add exact zeros, even if they are not finite. Sums of dtypes of 16 bits or less
    are float32. This costs a copy of the tensors and one all-reduce per `BUCKET_BYTES`.
    """
    for bucket in buckets(tensors):
        yield from Sum(bucket, weight, group).arrive()


class Sum(Generic[TensorT]):
    """The asynchronous weighted sum of one bucket over the ranks; collective to make.

    The bucket's tensors are as for `summed`, of one dtype and device.
    """

    def __init__(
        self, bucket: Sequence[TensorT], weight: float, group: dist.ProcessGroup | None
    ) -> None:
        self._bucket, self._flat = bucket, _flat(bucket, weight)
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def arrive(self) -> Iterator[tuple[TensorT, Tensor]]:
        assert self._work is not None, "every rank is in the group"
        self._work.wait()
        start = 0
        for tensor in self._bucket:
            real = _real(tensor)
            part = self._flat[start : start + real.numel()].view(real.shape)
            start += real.numel()
            yield tensor, torch.view_as_complex(part) if tensor.is_complex() else part


def buckets(tensors: Iterable[TensorT], most_bytes: int = BUCKET_BYTES) -> list[list[TensorT]]:
    """Return the tensors in buckets of one dtype and device, each of at least one tensor.

    Their order is the same on all ranks.
    """
    full, last = list[list[TensorT]](), dict[object, list[TensorT]]()
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        size_bytes = sum(map(_size_bytes, last.get(kind, ()))) + _size_bytes(tensor)
        if kind not in last or size_bytes > most_bytes:
            last[kind] = []
            full.append(last[kind])
        last[kind].append(tensor)
    return full


def gathered(mine: Sequence[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    """Return the numbers of every rank, in rank order; all ranks pass equally many.

    Collective over a CPU group.
    """
    own = torch.tensor(mine, dtype=torch.int64)
    of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, own, group=group)
    return [numbers.tolist() for numbers in of_ranks]


def anywhere(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Return for each flag whether it is set on any rank; collective over a CPU group."""
    merged = torch.tensor(flags, dtype=torch.uint8)
    dist.all_reduce(merged, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in merged.tolist()]


def sums_as(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of a dtype: at least 32 bits, because 16 bits round too much."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flat(bucket: Sequence[Tensor], weight: float) -> Tensor:
    reals = [_real(tensor) for tensor in bucket]
    dtype, device = sums_as(reals[0].dtype), reals[0].device
    if not weight:  # a product with 0 would keep non-finite values
        return torch.zeros(sum(real.numel() for real in reals), dtype=dtype, device=device)
    return torch.cat([real.reshape(-1).to(dtype) for real in reals]).mul_(weight)


class _RankMessage(NamedTuple):
    """What a rank is about to send."""

    step: int
    parameters: int
    samples: int = 0
    left_out: int = 0
    without_gradient: int = 0


class WeightedAverage:
    """Averages tensors over at least two ranks; all its calls are collective.

    Large tensors use ``group``. ``small_group``, with the same ranks, is for CPU tensors.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, small_group: dist.ProcessGroup | None
    ) -> None:
        self._group, self._small = group, small_group
        self.world_size = dist.get_world_size(group)

    def close(self) -> None:
        self._group = self._small = None

    @torch.no_grad()
    def gradients(
        self, step: int, parameters: Sequence[nn.Parameter], *, left_out: bool = False
    ) -> None:
        """Set the gradients of the parameters to their mean over the ranks.

        If only some ranks have a gradient, it counts as 0 on the others. If no rank has one, it
        stays ``None``. If a gradient scaler skipped the step on any rank, all ranks drop their
        gradients.
        """
        missing = sum(p.grad is None for p in parameters)
        messages = self._compare(_RankMessage(step, len(parameters), 0, left_out, missing))
        if any(rank.left_out for rank in messages):
            for parameter in parameters:
                parameter.grad = None
            return
        # A flag per parameter is sent only if some rank lacks a gradient.
        if any(rank.without_gradient for rank in messages):
            found = anywhere([p.grad is not None for p in parameters], self._small)
            parameters = [p for p, has in zip(parameters, found, strict=True) if has]
        for gradient, mean in summed(map(_gradient, parameters), 1 / self.world_size, self._group):
            gradient.copy_(mean)

    @torch.no_grad()
    def weights(
        self,
        step: int,
        parameters: Sequence[nn.Parameter],
        samples: int,
        trained: TrainedState | None,
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the parameters with their mean over the ranks; then average buffers.

        Ranks are weighted by their samples; a rank without samples adds zeros. If no rank has
        samples, no weights have changed and none are yielded. Buffers then have equal weights on
        all ranks. ``trained`` has the buffers.
        """
        messages = self._compare(_RankMessage(step, len(parameters), samples))
        total = sum(rank.samples for rank in messages)
        if total:
            yield from summed(parameters, samples / total, self._group)
        # This is collective and runs only after the caller has taken all pairs, so every rank must
        # take them.
        if trained is not None:
            self._buffers(trained, samples / total if total else 1 / self.world_size)

    @torch.no_grad()
    def states(self, step: int, tensors: Sequence[Tensor], samples: int) -> None:
        """Set tensors to their mean over the ranks, as `weights`, unless ranks differ in number."""
        messages = [
            _RankMessage(*numbers)
            for numbers in gathered(_RankMessage(step, len(tensors), samples), self._small)
        ]
        total = sum(rank.samples for rank in messages)
        if total and len({rank.parameters for rank in messages}) == 1:
            for tensor, mean in summed(tensors, samples / total, self._group):
                tensor.copy_(mean)

    @torch.no_grad()
    def _buffers(self, trained: TrainedState, weight: float) -> None:
        """Average the buffers that have changed; broadcast rank 0's integer buffers."""
        buffers, changed = trained.changed_buffers()
        changed = anywhere(changed, self._small)
        moved = [b for b, has in zip(buffers, changed, strict=True) if has]
        for buffer, mean in summed(filter(_has_mean, moved), weight, self._group):
            buffer.copy_(mean)
        for buffer in moved:
            if not _has_mean(buffer):
                # Collectives accept contiguous tensors only.
                whole = buffer.contiguous()
                dist.broadcast(whole, group=self._group, group_src=0)
                buffer.copy_(whole)
        trained.note_buffers()

    def _compare(self, mine: _RankMessage) -> list[_RankMessage]:
        """Return the messages of all ranks; raise if their steps or parameters differ."""
        # On the CPU group, so that no rank waits for its device to detect a mismatch.
        messages = [_RankMessage(*numbers) for numbers in gathered(mine, self._small)]
        if len({(rank.step, rank.parameters) for rank in messages}) > 1:
            raise _not_alike(messages)
        return messages


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        raise ConfigError(
            "a parameter has a sparse gradient, but the first steps of local-sgd(after=...) "
            "average only dense gradients; use sparse=False, or omit after"
        )
    return parameter.grad


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _not_alike(messages: Sequence[_RankMessage]) -> UsageError:
    steps = ", ".join(f"{rank.parameters} parameters in step {rank.step}" for rank in messages)
    return UsageError(
        f"the ranks average different tensors (in rank order: {steps}); every rank must call the "
        "same optimizers in the same order; use only one optimizer with a gradient scaler, which "
        "may skip its step on some ranks only"
    )
