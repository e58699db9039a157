"""The surrogate: a small network from the parameters of a simulation to its density profiles.

Layers, loss and optimizer are those of the network that the nanoconfinement tool on nanoHUB uses
(softmaterialslab/nanoconfinement-md, ``bin/infiles/my_model.h5``): 512 ReLU, dropout, 256 sigmoid,
dropout, a linear layer with one output for each bin; mean squared error; Adam at 1e-4. It has other
inputs and outputs here: three parameters instead of five, and both kinds of ions instead of one.
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
    """Return the network, from ``(n, inputs)`` to ``(n, 2 * bins)``; 0 switches dropout off."""
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
    """Where the inputs lie, which are brought to 0 to 1.

    Args:
        low: least value of each input.
        high: greatest value.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __call__(self, points: Tensor) -> Tensor:
        low, high = torch.tensor(self.low), torch.tensor(self.high)
        return (points.float() - low) / (high - low)


def targets(density_molar: Tensor, unit_molar: Tensor) -> Tensor:
    """Return profiles ``(n, 2, bins)`` as targets ``(n, 2 * bins)``.

    Both walls are alike, so each profile is averaged with its mirror image.

    Args:
        density_molar: the profiles.
        unit_molar: what each of them is counted in, ``(n,)``. With the concentration of the salt
            the squares of thin and of thick solutions weigh alike; in M, thin ones hardly count.
    """
    both = (density_molar + density_molar.flip(-1)) / 2
    return (both / unit_molar[:, None, None]).float().flatten(-2)


def fit(
    points: Tensor, profiles: Tensor, net: nn.Module, steps: int, batch: int, seed: int
) -> None:
    """Train a network in one process, in batches drawn without replacement.

    Args:
        points: scaled inputs, ``(n, inputs)``.
        profiles: targets, ``(n, 2 * bins)``.
        net: is trained in place.
        steps: of the optimizer.
        batch: samples in a step, or all if there are fewer.
        seed: of the order of the samples.
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
    """Return the densities that profiles are known by, ``(n, 2, 3)`` in the order of `NAMES`.

    Contact is the density half a diameter from the wall, peak the greatest, mid the one halfway
    between the walls; all of the mean of a profile and its mirror image.

    Args:
        density_molar: ``(n, 2, bins)`` in bins of one width from wall to wall.
        contact: where each profile's contact is, as a part of the length, ``(n,)``.
    """
    return at_marks(density_molar, density_molar, contact)


def at_marks(density_molar: Tensor, values: Tensor, contact: Tensor) -> Tensor:
    """Return other values, errors for example, where `marks` finds the densities."""
    both, bins = (values + values.flip(-1)) / 2, values.shape[-1]
    halfway = torch.full_like(contact, 0.5)
    at_contact, at_mid = (_at(both, place * bins - 0.5) for place in (contact, halfway))
    peak = (density_molar + density_molar.flip(-1)).argmax(-1, keepdim=True)
    return torch.stack((at_contact, both.gather(-1, peak)[..., 0], at_mid), dim=-1)


def _at(density_molar: Tensor, place: Tensor) -> Tensor:
    """Return ``(n, 2)`` densities between bins ``place`` and the next, ``(n,)`` bins."""
    low = place.long()
    part = (place - low).to(density_molar.dtype)[:, None]
    rows = torch.arange(len(place))
    return torch.lerp(density_molar[rows, :, low], density_molar[rows, :, low + 1], part)


def profile_errors(predicted: Tensor, simulated: Tensor) -> Tensor:
    """Return the root mean square error of each profile over its mean density, ``(n, 2)``."""
    squares = (predicted - simulated).square().mean(-1)
    return squares.sqrt() / simulated.mean(-1)
