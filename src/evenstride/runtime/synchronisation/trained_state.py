"""What of the watched models is trained: parameters and buffers, in an order all ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstride.runtime.engines.forward_timing import engine_of


class TrainedState:
    """The parameters and buffers of models, without those that DDP was told to ignore.

    Args of names: the number of the model, in the order of watching, and torch's own name.
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
        """The parameters that get gradients."""
        return [p for p in self.by_name.values() if p.requires_grad]

    def of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return those of them that an optimizer steps."""
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
