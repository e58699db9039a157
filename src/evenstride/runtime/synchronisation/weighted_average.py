"""What is trained of the watched models, and the ranks' means of gradients, weights and buffers.

Before anything large is sent, ranks tell each other what they are about to bring, so that a
misunderstanding is an error with a name, and not a wrong sum or a wait without end.

Tensors of one kind and device are sent as one flat tensor, up to some tens of megabytes. An
all-reduce gives every rank the same bytes, so what is made of them is the same everywhere.
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

# Enough for a collective to run at full speed, little beside a model.
BUCKET_BYTES = 2**25


class TrainedState:
    """The parameters and buffers of models, without those that DDP was told to ignore.

    They are in an order that all ranks share. Names are the number of the model, in the order of
    watching, and torch's own name.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, nn.Parameter] = {}
        self._modules: list[tuple[nn.Module, frozenset[str]]] = []
        self._seen: dict[str, Tensor] = {}  # buffers as they last were alike on all ranks
        self.has_buffers = False

    def watch(self, model: nn.Module) -> None:
        """Know a model whose parameters and buffers are alike on all ranks."""
        engine = engine_of(model)
        inner = getattr(engine, "module", engine)
        ignored = frozenset(getattr(engine, "parameters_to_ignore", ()))
        # Models may share parameters, which count once.
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
        """Return what an optimizer keeps for each element of its parameters, such as momenta."""
        kept = []
        for parameter in self.of(optimizer):
            states = optimizer.state.get(parameter, {})
            # Sorted, as all ranks must send them in one order.
            kept += [states[name] for name in sorted(states) if _alike(states[name], parameter)]
        return kept

    def changed_buffers(self) -> tuple[list[Tensor], list[bool]]:
        """Return all buffers, and whether each has changed since `note_buffers`.

        Most never do, such as masks and tables; a weighted mean of equal numbers would.
        """
        named = dict(self._buffers())
        changed = [not _equal(tensor, self._seen.get(name)) for name, tensor in named.items()]
        return list(named.values()), changed

    def note_buffers(self) -> None:
        """Note that the buffers are alike on all ranks; costs a copy of them."""
        self._seen = {name: tensor.detach().clone() for name, tensor in self._buffers()}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        # Looked up anew, because a forward pass may put another tensor in a buffer's place.
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
    """Yield each tensor with the sum over ranks of ``weight`` times theirs; collective.

    The tensors are floating-point or complex, alike in number, shape and kind on all ranks. With
    weight 0, whatever they hold adds exact zeros. Sums of 16 bits and less are float32. This costs
    a copy of the tensors and one all-reduce per `BUCKET_BYTES`.
    """
    for bucket in buckets(tensors):
        yield from Sum(bucket, weight, group).arrive()


class Sum(Generic[TensorT]):
    """The weighted sum of one bucket over the ranks, on its way; collective to make.

    The bucket's tensors are as `summed` takes them, of one kind and device.
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
    """Return the tensors in buckets of one kind and device, each of at least one tensor.

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
    """Return every rank's numbers, as many on all, in rank order.

    Collective over a group of the CPU.
    """
    own = torch.tensor(mine, dtype=torch.int64)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    return [numbers.tolist() for numbers in everyone]


def anywhere(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Return for each flag whether it is set on any rank; collective, over a group of the CPU."""
    told = torch.tensor(flags, dtype=torch.uint8)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in told.tolist()]


def sums_as(dtype: torch.dtype) -> torch.dtype:
    """Return the kind that sums of a kind are made in: 16 bits would round too much."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flat(bucket: Sequence[Tensor], weight: float) -> Tensor:
    reals = [_real(tensor) for tensor in bucket]
    dtype, device = sums_as(reals[0].dtype), reals[0].device
    if not weight:  # a product with 0 would let through what is not finite
        return torch.zeros(sum(real.numel() for real in reals), dtype=dtype, device=device)
    return torch.cat([real.reshape(-1).to(dtype) for real in reals]).mul_(weight)


class _RankMessage(NamedTuple):
    """What a rank tells the others."""

    step: int
    parameters: int
    samples: int = 0
    left_out: int = 0
    without_gradient: int = 0


class WeightedAverage:
    """Averages tensors over the ranks, at least two; all its calls are collective.

    Large tensors are sent over ``group``. ``small_group``, another one of the same ranks, serves
    the CPU.
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
        """Give the parameters, the same on all ranks, the mean of all ranks' gradients.

        Where only some ranks have a gradient, those of the others count as 0; without any there is
        none. If a gradient scaler has left out the step on any rank, no rank has gradients
        afterwards.
        """
        missing = sum(p.grad is None for p in parameters)
        told = self._tell(_RankMessage(step, len(parameters), 0, left_out, missing))
        if any(rank.left_out for rank in told):
            for parameter in parameters:
                parameter.grad = None
            return
        # A flag for each parameter is sent only where some rank lacks a gradient.
        if any(rank.without_gradient for rank in told):
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

        A rank counts by its samples; without any it adds nothing. If no rank has any, no weights
        have changed and none are yielded; buffers then count alike. ``trained`` has the buffers.
        """
        told = self._tell(_RankMessage(step, len(parameters), samples))
        total = sum(rank.samples for rank in told)
        if total:
            yield from summed(parameters, samples / total, self._group)
        # Reached only by a caller that takes all pairs, and it is collective: every rank must take
        # them.
        if trained is not None:
            self._buffers(trained, samples / total if total else 1 / self.world_size)

    @torch.no_grad()
    def states(self, step: int, tensors: Sequence[Tensor], samples: int) -> None:
        """Give tensors their mean over the ranks, as `weights`; nothing if some rank lacks any."""
        told = [
            _RankMessage(*numbers)
            for numbers in gathered(_RankMessage(step, len(tensors), samples), self._small)
        ]
        total = sum(rank.samples for rank in told)
        if total and len({rank.parameters for rank in told}) == 1:
            for tensor, mean in summed(tensors, samples / total, self._group):
                tensor.copy_(mean)

    @torch.no_grad()
    def _buffers(self, trained: TrainedState, weight: float) -> None:
        """Average buffers that have changed; of those of whole numbers, rank 0's count."""
        buffers, changed = trained.changed_buffers()
        changed = anywhere(changed, self._small)
        moved = [b for b, has in zip(buffers, changed, strict=True) if has]
        for buffer, mean in summed(filter(_has_mean, moved), weight, self._group):
            buffer.copy_(mean)
        for buffer in moved:
            if not _has_mean(buffer):
                # Collectives take contiguous tensors only.
                whole = buffer.contiguous()
                dist.broadcast(whole, group=self._group, group_src=0)
                buffer.copy_(whole)
        trained.note_buffers()

    def _tell(self, mine: _RankMessage) -> list[_RankMessage]:
        """Return what all ranks tell, or raise if they are not about to bring the same."""
        # On the group of the CPU, so that nobody waits for a device to learn of a
        # misunderstanding.
        told = [_RankMessage(*numbers) for numbers in gathered(mine, self._small)]
        if len({(rank.step, rank.parameters) for rank in told}) > 1:
            raise _not_alike(told)
        return told


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        raise ConfigError(
            "a parameter has a sparse gradient, and the first steps of local-sgd(after=...) "
            "average dense ones only; use sparse=False, or leave out after"
        )
    return parameter.grad


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _not_alike(told: Sequence[_RankMessage]) -> UsageError:
    steps = ", ".join(f"{rank.parameters} parameters in step {rank.step}" for rank in told)
    return UsageError(
        f"the ranks are to average different things (in rank order: {steps}); let every rank call "
        "the same optimizers in the same order, and use one optimizer with a gradient scaler, "
        "which may leave out its step on some ranks only"
    )
