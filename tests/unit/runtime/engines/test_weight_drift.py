"""The fingerprint of weights: of all bits, in little memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from evenstride.runtime.engines.weight_drift import fingerprint

_LARGE = 2**23 + 5


class Widest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most int64 elements that one operation makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at its result."""
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.int64:
            self.most = max(self.most, made.numel())
        return made


def test_a_large_parameter_is_widened_in_pieces() -> None:
    weights = torch.arange(_LARGE, dtype=torch.float32)
    bits = weights.view(torch.int32).to(torch.int64)
    expected = torch.stack([bits.sum(), bits.square().sum()])

    with Widest() as widest:  # type: ignore[no-untyped-call]
        found = fingerprint([weights])

    assert torch.equal(found, expected)
    assert 0 < widest.most <= 2**22


def test_parameters_of_every_kind_and_layout_count() -> None:
    kinds = [
        torch.tensor(1.0),
        torch.ones(3, 4).t(),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.bfloat16),
        torch.empty(0),
    ]
    alone = torch.stack([fingerprint([each]) for each in kinds]).sum(0)

    assert torch.equal(fingerprint(kinds), alone)
    assert not torch.equal(fingerprint([kinds[1]]), fingerprint([2 * kinds[1]]))
