"""The trained state of the watched models, and the ranks' means of gradients, weights and buffers.

Before ranks send large tensors, they compare descriptions of them. So a disagreement raises an
error instead of a wrong sum or an endless wait.

Tensors of one dtype and device are sent as one flat tensor, up to some tens of megabytes. An
all-reduce gives every rank the same bytes, so the results are the same on all ranks.
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

# Large enough for a collective to run at full speed, and small compared with a model.
BUCKET_BYTES = 2**25


class TrainedState:
    """The parameters and buffers of models, without those that DDP is set to ignore.

    Their order is the same on all ranks. A name consists of the number of the model, in the order
    of watching, and torch's own name.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, nn.Parameter] = {}
        self._modules: list[tuple[nn.Module, frozenset[str]]] = []
        self._seen: dict[str, Tensor] = {}  # buffers when they last were equal on all ranks
        self.has_buffers = False

    def watch(self, model: nn.Module) -> None:
        """Add a model whose parameters and buffers are equal on all ranks."""
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
        """Return an optimizer's states per element of its parameters, such as momenta."""
        kept = []
        for parameter in self.of(optimizer):
            states = optimizer.state.get(parameter, {})
            # Sorted, because all ranks must send them in the same order.
            kept += [states[name] for name in sorted(states) if _alike(states[name], parameter)]
        return kept

    def changed_buffers(self) -> tuple[list[Tensor], list[bool]]:
        """Return all buffers, and whether each has changed since `note_buffers`.

        Most never change, such as masks and tables. A weighted mean would change even equal ones
        by rounding.
        """
        named = dict(self._buffers())
        changed = [not _equal(tensor, self._seen.get(name)) for name, tensor in named.items()]
        return list(named.values()), changed

    def note_buffers(self) -> None:
        """Note that the buffers are equal on all ranks; costs a copy of them."""
        self._seen = {name: tensor.detach().clone() for name, tensor in self._buffers()}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        # Looked up each time, because a forward pass may replace a buffer by another tensor.
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
    """Yield each tensor with its weighted sum over the ranks; collective.

    The tensors are floating-point or complex, with equal number, shapes and dtypes on all ranks.
    With weight 0, they add exact zeros, even if they hold inf or nan. Sums of dtypes with 16 or
    fewer bits are float32. This costs a copy of the tensors and one all-reduce per `BUCKET_BYTES`.
    """
    for bucket in buckets(tensors):
        yield from Sum(bucket, weight, group).arrive()


class Sum(Generic[TensorT]):
    """An asynchronous weighted sum of one bucket over the ranks; its creation is collective.

    The bucket's tensors have one dtype and device; for the rest see `summed`.
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
    """Return the tensors in buckets of one dtype and device, each with at least one tensor.

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
    """Return every rank's numbers, in rank order; all ranks pass the same number of them.

    Collective over a group for CPU tensors.
    """
    own = torch.tensor(mine, dtype=torch.int64)
    everywhere = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everywhere, own, group=group)
    return [numbers.tolist() for numbers in everywhere]


def anywhere(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Return for each flag whether any rank sets it; collective over a group for CPU tensors."""
    largest = torch.tensor(flags, dtype=torch.uint8)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in largest.tolist()]


def sums_as(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of a dtype: 16 bits would round too much."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flat(bucket: Sequence[Tensor], weight: float) -> Tensor:
    reals = [_real(tensor) for tensor in bucket]
    dtype, device = sums_as(reals[0].dtype), reals[0].device
    if not weight:  # 0 times inf or nan would be nan
        return torch.zeros(sum(real.numel() for real in reals), dtype=dtype, device=device)
    return torch.cat([real.reshape(-1).to(dtype) for real in reals]).mul_(weight)


class _RankMessage(NamedTuple):
    """A rank's description of its tensors, for the other ranks."""

    step: int
    parameters: int
    samples: int = 0
    left_out: int = 0
    without_gradient: int = 0


class WeightedAverage:
    """Averages tensors over at least two ranks; all its calls are collective.

    Large tensors are sent over ``group``. ``small_group`` has the same ranks and is for CPU
    tensors.
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
        """Set the gradients of the parameters to the mean over all ranks.

        The parameters are the same on all ranks. If only some ranks have a gradient, those of the
        others count as 0; if no rank has one, it stays ``None``. If a gradient scaler has skipped
        the step on any rank, no rank has gradients afterwards.
        """
        missing = sum(p.grad is None for p in parameters)
        shown = self._compare(_RankMessage(step, len(parameters), 0, left_out, missing))
        if any(rank.left_out for rank in shown):
            for parameter in parameters:
                parameter.grad = None
            return
        # A flag for each parameter is sent only if a rank lacks a gradient.
        if any(rank.without_gradient for rank in shown):
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

        Ranks are weighted by their samples. If no rank has samples, weights have not changed: no
        parameters are yielded, and buffers are weighted equally. ``trained`` has the buffers.
        """
        shown = self._compare(_RankMessage(step, len(parameters), samples))
        total = sum(rank.samples for rank in shown)
        if total:
            yield from summed(parameters, samples / total, self._group)
        # Collective, and reached only after all pairs are taken: every rank must take all pairs.
        if trained is not None:
            self._buffers(trained, samples / total if total else 1 / self.world_size)

    @torch.no_grad()
    def states(self, step: int, tensors: Sequence[Tensor], samples: int) -> None:
        """Set tensors to their mean over the ranks, as in `weights`, if all ranks have them."""
        shown = [
            _RankMessage(*numbers)
            for numbers in gathered(_RankMessage(step, len(tensors), samples), self._small)
        ]
        total = sum(rank.samples for rank in shown)
        if total and len({rank.parameters for rank in shown}) == 1:
            for tensor, mean in summed(tensors, samples / total, self._group):
                tensor.copy_(mean)

    @torch.no_grad()
    def _buffers(self, trained: TrainedState, weight: float) -> None:
        """Average the buffers that have changed; integer buffers are copied from rank 0."""
        buffers, changed = trained.changed_buffers()
        changed = anywhere(changed, self._small)
        moved = [b for b, has in zip(buffers, changed, strict=True) if has]
        for buffer, mean in summed(filter(_has_mean, moved), weight, self._group):
            buffer.copy_(mean)
        for buffer in moved:
            if not _has_mean(buffer):
                # Collectives accept only contiguous tensors.
                whole = buffer.contiguous()
                dist.broadcast(whole, group=self._group, group_src=0)
                buffer.copy_(whole)
        trained.note_buffers()

    def _compare(self, mine: _RankMessage) -> list[_RankMessage]:
        """Return the messages of all ranks, or raise if their step or parameters differ."""
        # On the CPU group, so that no rank waits for a device before it sees the disagreement.
        shown = [_RankMessage(*numbers) for numbers in gathered(mine, self._small)]
        if len({(rank.step, rank.parameters) for rank in shown}) > 1:
            raise _not_alike(shown)
        return shown


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        raise ConfigError(
            "a parameter has a sparse gradient, but the first steps of local-sgd(after=...) "
            "average only dense ones; use sparse=False, or remove after"
        )
    return parameter.grad


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _not_alike(shown: Sequence[_RankMessage]) -> UsageError:
    steps = ", ".join(f"{rank.parameters} parameters in step {rank.step}" for rank in shown)
    return UsageError(
        f"the ranks cannot average their tensors, which differ (in rank order: {steps}). Step the "
        "same optimizers in the same order on every rank. With a gradient scaler, which may skip "
        "the step on some ranks only, use one optimizer"
    )
