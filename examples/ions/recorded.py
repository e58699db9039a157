"""Compare these simulations, or a surrogate trained on them, with recorded molecular dynamics.

    python -m examples.ions.recorded --data DIR                  # simulates three recorded points
    python -m examples.ions.recorded --data DIR --bag FOLDER     # evaluates FOLDER/surrogate.pt

DIR holds ionic-density-profiles.npz (see docs/records/ions.md).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from examples.ions.bag import RANGES, Bag
from examples.ions.files import read_whole
from examples.ions.model import Slab
from examples.ions.network import predict, profile_errors, surrogate
from examples.ions.profiles import DEFAULT, load
from examples.ions.simulate import Settings, Simulation
from examples.ions.surrogate import SALT, SCALE
from torch import Tensor

POINTS = ((4.0, 0.1, -0.02), (4.0, 0.5, -0.01), (5.0, 2.0, -0.02))

Array = npt.NDArray[np.float64]


def rebinned(z_nm: Array, density: Array, edges_nm: Array) -> Tensor:
    """Return mean densities between edges, from densities in equal bins centred at ``z_nm``."""
    width_nm = z_nm[1] - z_nm[0]
    bounds_nm = np.append(z_nm - width_nm / 2, z_nm[-1] + width_nm / 2)
    summed = np.append(0.0, np.cumsum(density) * width_nm)
    means = np.diff(np.interp(edges_nm, bounds_nm, summed)) / np.diff(edges_nm)
    return torch.from_numpy(means)


def read(folder: Path, bins: int) -> tuple[Tensor, Tensor]:
    """Return points ``(n, 3)`` and profiles ``(n, 2, bins)`` in M, averaged with their mirror.

    Raises:
        SystemExit: The file is missing.
    """
    points, arrays = load(folder)
    z_nm, density = arrays["z"], arrays["density"]
    profiles = []
    for row, point in enumerate(points):
        edges_nm = np.linspace(-point[0] / 2, point[0] / 2, bins + 1)
        both = [rebinned(z_nm[row, s], density[row, s], edges_nm) for s in range(2)]
        profiles.append(torch.stack(both))
    found = torch.stack(profiles)
    return torch.from_numpy(points), (found + found.flip(-1)) / 2


def simulate(points: Tensor, profiles: Tensor, settings: Settings, seed: int) -> None:
    """Simulate some recorded points and print the differences from the recorded profiles."""
    for point in POINTS:
        (row,) = torch.nonzero((points - torch.tensor(point)).abs().amax(-1) < 1e-6)[:, 0].tolist()
        begun_s = time.monotonic()
        run = Simulation(Slab(*point), settings, seed)
        run.advance(settings.equilibrate + settings.sweeps)
        ours = run.profiles()
        density = (ours.density_molar + ours.density_molar.flip(-1)) / 2
        inner = ours.z_nm.abs() < point[0] / 2 - 0.3  # there are hardly any ions beyond
        off = (density / profiles[row] - 1)[:, inner].square().mean(-1).sqrt()
        error = (ours.error_molar / 2**0.5 / density)[:, inner].mean(-1)
        peaks = density.amax(-1) / profiles[row].amax(-1) - 1
        print(
            "{} nm, {} M, {} C/m2:".format(*point),
            *(
                f"{name} ions differ by {off[s]:.1%} (standard error {error[s]:.1%}), "
                f"peak by {peaks[s]:+.1%};"
                for s, name in enumerate(("positive", "negative"))
            ),
            f"{time.monotonic() - begun_s:.0f} s",
            flush=True,
        )


def judge(points: Tensor, profiles: Tensor, folder: Path) -> None:
    """Print the error of a surrogate against the recorded profiles, by concentration."""
    net = surrogate(len(RANGES), Bag(folder).design.settings.bins)
    net.load_state_dict(read_whole(folder / "surrogate.pt"))
    predicted = predict(net, SCALE(points)).double() * points[:, SALT, None, None]
    errors = profile_errors(predicted, profiles).mean(-1)
    for salt in points[:, SALT].unique():
        print(f"{salt:5.2f} M: {errors[points[:, SALT] == salt].mean():.1%}")
    print(f"  all  : {errors.mean():.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DEFAULT)
    parser.add_argument("--bag", type=Path, help="folder with a trained surrogate.pt")
    parser.add_argument("--sweeps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bins = Bag(args.bag).design.settings.bins if args.bag else 50
    points, profiles = read(args.data, bins)
    if args.bag:
        judge(points, profiles, args.bag)
    else:
        simulate(points, profiles, Settings(sweeps=args.sweeps, bins=bins), args.seed)


if __name__ == "__main__":
    main()
