"""Compare these simulations, or a surrogate trained on them, with recorded molecular dynamics.

    python -m examples.ions.recorded --data DIR                  # simulates three recorded points
    python -m examples.ions.recorded --data DIR --method dynamics --sweeps 1000
    python -m examples.ions.recorded --data DIR --bag FOLDER     # evaluates FOLDER/surrogate.pt

DIR holds ionic-density-profiles.npz (see docs/records/ions.md).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from examples.ions.bag import RANGES, Bag
from examples.ions.files import read_whole
from examples.ions.model import Slab
from examples.ions.network import predict, profile_errors, surrogate
from examples.ions.profiles import DEFAULT, TOO_WIDE, load
from examples.ions.simulate import METHODS, Settings, Simulation, contact_molar
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


def read(folder: Path, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return points ``(n, 3)``, profiles and their standard errors ``(n, 2, bins)`` in M.

    Profiles are averaged with their mirror images. Averaging over a bin reduces no error, because
    the recorded bins are narrower than those that were counted.

    Raises:
        SystemExit: The file is missing.
    """
    points, arrays = load(folder)
    found = []
    for name in ("density", "error_raw"):
        rows = [_row(points[n], arrays["z"][n], arrays[name][n], bins) for n in range(len(points))]
        values = torch.stack(rows)
        found.append((values + values.flip(-1)) / 2)
    return torch.from_numpy(points), found[0], found[1] / TOO_WIDE / 2**0.5


def _row(point: Array, z_nm: Array, values: Array, bins: int) -> Tensor:
    edges_nm = np.linspace(-point[0] / 2, point[0] / 2, bins + 1)
    return torch.stack([rebinned(z_nm[s], values[s], edges_nm) for s in range(2)])


def simulate(folder: Path, settings: Settings, seed: int) -> None:
    """Simulate some recorded points and print the differences from the recorded profiles."""
    points, *recorded = read(folder, settings.bins)
    for point in POINTS:
        (row,) = torch.nonzero((points - torch.tensor(point)).abs().amax(-1) < 1e-6)[:, 0].tolist()
        begun_s = time.monotonic()
        run = Simulation(Slab(*point), settings, seed)
        run.advance(settings.equilibrate + settings.sweeps)
        print("{} nm, {} M, {} C/m2:".format(*point), f"{time.monotonic() - begun_s:.0f} s")
        differences = compared(run, *(values[row] for values in recorded))
        for name, found in zip(("positive", "negative"), differences, strict=True):
            at_places = (f"{place} {off:+.1%} ({of:.1%})" for place, (off, of) in found.items())
            print(f"  {name} ions differ by", ", ".join(at_places), flush=True)


def compared(run: Simulation, density: Tensor, error: Tensor) -> list[dict[str, tuple[float, ...]]]:
    """Compare a simulation with a recorded profile.

    Returns:
        For both kinds of ions, (difference, its standard error) as fractions: the root mean square
        over the ``profile`` more than 0.3 nm from a wall, and at ``contact``, ``peak`` and ``mid``.
    """
    ours, box = run.profiles(), run.box
    mine = (ours.density_molar + ours.density_molar.flip(-1)) / 2
    both = torch.hypot(ours.error_molar / 2**0.5, error)
    off, of = (mine - density) / density, both / density
    inner = ours.z_nm.abs() < box.slab.length_nm / 2 - 0.3  # there are hardly any ions beyond
    at, theirs, errors = (
        contact_molar(replace(ours, density_molar=x), box) for x in (mine, density, both)
    )
    found = []
    for s in range(2):
        peak, mid = int(density[s].argmax()), mine.shape[-1] // 2
        found.append(
            {
                "profile": (
                    off[s, inner].square().mean().sqrt(),
                    of[s, inner].square().mean().sqrt(),
                ),
                "contact": (at[s] / theirs[s] - 1, errors[s] / theirs[s]),
                "peak": (off[s, peak], of[s, peak]),
                "mid": (off[s, mid], of[s, mid]),
            }
        )
    return [{n: (float(a), float(b)) for n, (a, b) in places.items()} for places in found]


def judge(recordings: Path, folder: Path) -> None:
    """Print the error of a surrogate against the recorded profiles, by concentration."""
    bins = Bag(folder).design.settings.bins
    points, profiles, _ = read(recordings, bins)
    net = surrogate(len(RANGES), bins)
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
    parser.add_argument("--method", choices=METHODS, default=METHODS[0])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.bag:
        judge(args.data, args.bag)
    else:
        settings = Settings(sweeps=args.sweeps, bins=50, method=args.method)
        simulate(args.data, settings, args.seed)


if __name__ == "__main__":
    main()
