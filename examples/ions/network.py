"""The surrogate: a small network that maps the parameters of a simulation to density profiles.

Layers, loss and optimizer are those of the nanoconfinement tool on nanoHUB
(softmaterialslab/nanoconfinement-md, ``bin/infiles/my_model.h5``). Its layers are 512 ReLU,
dropout, 256 sigmoid, dropout, and a linear layer with one output per bin. Its training uses the
mean squared error and Adam at 1e-4. Here it has three parameters instead of five as inputs, and
both kinds of ions instead of one as outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RATE = 1e-4
DROPOUT = 0.15
WIDTHS = (512, 256)
NAMES = ("contact", "peak", "mid")


def surrogate(inputs: int, bins: int, dropout: float = DROPOUT) -> nn.Sequential:
    """Return the network, from ``(n, inputs)`` to ``(n, 2 * bins)``."""
    wide, narrow = WIDTHS
    return nn.Sequential(
        nn.Linear(inputs, wide),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(wide, narrow),
        nn.Sigmoid(),
        nn.Dropout(dropout),
        nn.Linear(narrow, 2 * bins),
    )


@dataclass(frozen=True, slots=True)
class Scale:
    """Scales inputs to the range 0 to 1.

    Args:
        low: Smallest value of each input.
        high: Largest value of each input.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __call__(self, points: Tensor) -> Tensor:
        low, high = torch.tensor(self.low), torch.tensor(self.high)
        return (points.float() - low) / (high - low)


def targets(density_molar: Tensor, unit_molar: Tensor) -> Tensor:
    """Return profiles ``(n, 2, bins)`` as targets ``(n, 2 * bins)``.

    The walls are equal, so each profile is averaged with its mirror image.

    Args:
        density_molar: Profiles.
        unit_molar: Unit of each profile, ``(n,)``. With the salt concentration as the unit, dilute
            and concentrated solutions have equal weight. In M, dilute ones have almost none.
    """
    both = (density_molar + density_molar.flip(-1)) / 2
    return (both / unit_molar[:, None, None]).float().flatten(-2)


def fit(
    points: Tensor, profiles: Tensor, net: nn.Module, steps: int, batch: int, seed: int
) -> None:
    """Train a network in place, in one process, on batches drawn without replacement.

    Args:
        points: Scaled inputs, ``(n, inputs)``.
        profiles: Targets, ``(n, 2 * bins)``.
        net: Network to train.
        steps: Optimizer steps.
        batch: Samples per step, at most.
        seed: Seed of the sample order.
    """
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE, fused=True)
    random = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    net.train()
    for _ in range(steps):
        if not len(order):
            order = torch.randperm(len(points), generator=random)
        here, order = order[:batch], order[batch:]
        F.mse_loss(net(points[here]), profiles[here]).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def predict(net: nn.Module, points: Tensor) -> Tensor:
    """Return profiles ``(n, 2, bins)`` in M for scaled inputs ``(n, inputs)``."""
    training = net.training
    net.eval()
    predicted: Tensor = net(points)
    net.train(training)
    return predicted.unflatten(-1, (2, -1))


def marks(density_molar: Tensor, contact: Tensor) -> Tensor:
    """Return characteristic densities of profiles, ``(n, 2, 3)`` in the order of `NAMES`.

    ``contact`` is the density half a diameter from the wall, ``peak`` the largest density, and
    ``mid`` the density halfway between the walls. Each profile is averaged with its mirror image.

    Args:
        density_molar: Profiles ``(n, 2, bins)`` in equal bins from wall to wall.
        contact: Place of the contact density as a fraction of the length, ``(n,)``.
    """
    return at_marks(density_molar, density_molar, contact)


def at_marks(density_molar: Tensor, values: Tensor, contact: Tensor) -> Tensor:
    """Return other values, such as errors, at the places where `marks` finds the densities."""
    both, bins = (values + values.flip(-1)) / 2, values.shape[-1]
    halfway = torch.full_like(contact, 0.5)
    at_contact, at_mid = (_at(both, place * bins - 0.5) for place in (contact, halfway))
    peak = (density_molar + density_molar.flip(-1)).argmax(-1, keepdim=True)
    return torch.stack((at_contact, both.gather(-1, peak)[..., 0], at_mid), dim=-1)


def _at(density_molar: Tensor, place: Tensor) -> Tensor:
    """Return densities ``(n, 2)`` interpolated at fractional bins ``place``, ``(n,)``."""
    low = place.long()
    part = (place - low).to(density_molar.dtype)[:, None]
    rows = torch.arange(len(place))
    return torch.lerp(density_molar[rows, :, low], density_molar[rows, :, low + 1], part)


def profile_errors(predicted: Tensor, simulated: Tensor) -> Tensor:
    """Return the root mean square error of each profile relative to its mean, ``(n, 2)``."""
    squares = (predicted - simulated).square().mean(-1)
    return squares.sqrt() / simulated.mean(-1)
