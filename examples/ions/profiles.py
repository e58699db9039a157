"""Train the same network on 162 recorded molecular dynamics simulations and print its errors.

    python -m examples.ions.profiles --data DIR --plot profiles.png

DIR holds ionic-density-profiles.npz (see docs/records/ions.md for its origin). Its simulations form
a grid of 6 confinement lengths, 9 salt concentrations and 3 surface charges. Held out are random
simulations, or all of one concentration. A quadratic polynomial is evaluated for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.ions.network import (
    DROPOUT,
    NAMES,
    Scale,
    at_marks,
    fit,
    marks,
    predict,
    profile_errors,
    surrogate,
    targets,
)
from torch import Tensor

DEFAULT = Path(os.environ.get("EVENSTRIDE_DATA", "data"), "ionic-density")
FILE = "ionic-density-profiles.npz"
TOO_WIDE = 2.1  # the recorded errors must be divided by this, according to their authors
_SALT = 1  # column of the points


@dataclass(frozen=True, slots=True)
class Recorded:
    """Recorded simulations.

    Args:
        points: Length in nm, salt in M and wall charge in C/m2, ``(n, 3)``.
        density_molar: Densities ``(n, 2, bins)``, positive ions first.
        error_molar: Their standard errors, in the same shape.
        contact: Place where ions touch a wall, as a fraction of the recorded bins, ``(n,)``.
    """

    points: Tensor
    density_molar: Tensor
    error_molar: Tensor
    contact: Tensor


@dataclass(frozen=True, slots=True)
class Training:
    """Settings of a training; see `network.fit`."""

    steps: int = 10_000
    batch: int = 32
    dropout: float = DROPOUT
    seed: int = 0
    per_salt: bool = True


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the inputs that vary, ``(n, 3)``, and all arrays of the file by name.

    Raises:
        SystemExit: The file is missing.
    """
    path = folder / FILE
    if not path.is_file():
        raise SystemExit(f"{path} is missing; pass --data DIR with {FILE}")
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return arrays["params"][:, [column(arrays, name) for name in ("Z", "c", "i")]], arrays


def column(arrays: dict[str, Any], name: str) -> int:
    """Return the column of a named parameter."""
    return [str(known) for known in arrays["param_names"]].index(name)


def read(folder: Path) -> Recorded:
    """Return the recorded simulations, with bins averaged in pairs.

    Raises:
        SystemExit: The file is missing.
    """
    points, arrays = load(folder)
    wall_to_ion_nm = arrays["params"][:, column(arrays, "d")] / 2
    z_nm = arrays["z"][:, 0]
    density, error = (_in_pairs(arrays[name]) for name in ("density", "error_raw"))
    # The recorded bins extend slightly beyond the walls, so places are relative to the bins.
    span_nm = (z_nm[:, -1] - z_nm[:, 0]) * z_nm.shape[1] / (z_nm.shape[1] - 1)
    contact = torch.from_numpy(0.5 + (wall_to_ion_nm - points[:, 0] / 2) / span_nm)
    return Recorded(torch.from_numpy(points), density, error / TOO_WIDE, contact)


def _in_pairs(array: Any) -> Tensor:
    # Both bins of a pair were interpolated from one wider bin, so averaging does not reduce errors.
    return torch.from_numpy(array).unflatten(-1, (-1, 2)).mean(-1)


def by_network(recorded: Recorded, train: Tensor, test: Tensor, how: Training) -> Tensor:
    """Return the profiles of ``test`` predicted by a network trained on ``train``."""
    low, high = recorded.points.amin(0), recorded.points.amax(0)
    points = Scale(tuple(low.tolist()), tuple(high.tolist()))(recorded.points)
    salt = recorded.points[:, _SALT]
    unit = salt if how.per_salt else torch.ones_like(salt)
    torch.manual_seed(how.seed)
    net = surrogate(points.shape[-1], recorded.density_molar.shape[-1], how.dropout)
    profiles = targets(recorded.density_molar, unit)
    fit(points[train], profiles[train], net, how.steps, how.batch, how.seed)
    return predict(net, points[test]).double() * unit[test][:, None, None]


def by_polynomial(recorded: Recorded, train: Tensor, test: Tensor) -> Tensor:
    """Return the profiles of ``test`` predicted by a quadratic polynomial for each bin."""
    low, high = recorded.points.amin(0), recorded.points.amax(0)
    x = (recorded.points - low) / (high - low)
    first, second = torch.triu_indices(3, 3)
    terms = torch.cat((torch.ones(len(x), 1, dtype=x.dtype), x, x[:, first] * x[:, second]), dim=1)
    profiles = targets(recorded.density_molar, torch.ones(len(x))).double()
    solved = torch.linalg.lstsq(terms[train], profiles[train]).solution
    return (terms[test] @ solved).unflatten(-1, (2, -1))


def judge(recorded: Recorded, test: Tensor, predicted: Tensor) -> dict[str, float]:
    """Return mean errors of predictions.

    Returns:
        ``profile``: root mean square error of a profile relative to its mean. ``contact``, ``peak``
        and ``mid``: relative error of that density. ``..._sigmas``: median of that error in
        standard errors of the simulation. ``..._noise``: relative standard error of the simulation.
    """
    simulated, contact = recorded.density_molar[test], recorded.contact[test]
    truth, guess = marks(simulated, contact), marks(predicted, contact)
    # Averaging over both walls reduces the error by the square root of two.
    sigma = at_marks(simulated, recorded.error_molar[test], contact) / 2**0.5
    off = (guess - truth).abs()
    errors = {"profile": float(profile_errors(predicted, simulated).mean())}
    for n, name in enumerate(NAMES):
        errors[name] = float((off / truth)[..., n].mean())
        errors[f"{name}_sigmas"] = float((off / sigma)[..., n].median())
        errors[f"{name}_noise"] = float((sigma / truth)[..., n].mean())
    return errors


def random_split(count: int, part: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the simulations to train and those held out, chosen at random."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    held_out = round(part * count)
    return order[held_out:], order[:held_out]


def salt_splits(recorded: Recorded) -> dict[float, tuple[Tensor, Tensor]]:
    """Return, for each concentration, the split that holds out all of its simulations."""
    salt = recorded.points[:, _SALT]
    return {
        value: (torch.nonzero(salt != value)[:, 0], torch.nonzero(salt == value)[:, 0])
        for value in salt.unique().tolist()
    }


def plot(recorded: Recorded, test: Tensor, predicted: Tensor, path: Path) -> None:
    """Plot the first held-out simulations and their predictions. Requires matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 6), layout="constrained")
    bins = recorded.density_molar.shape[-1]
    for panel, n, guess in zip(axes.flat, test.tolist(), predicted, strict=False):
        length_nm, salt_molar, charge = recorded.points[n].tolist()
        z_nm = ((torch.arange(bins) + 0.5) / bins - 0.5) * length_nm
        for species, (name, colour) in enumerate((("positive", "C3"), ("negative", "C0"))):
            simulated, error = recorded.density_molar[n, species], recorded.error_molar[n, species]
            panel.fill_between(z_nm, simulated - error, simulated + error, color=colour, alpha=0.3)
            panel.plot(z_nm, guess[species], color=colour, label=f"{name}, predicted")
        panel.set_title(f"{length_nm:g} nm, {salt_molar:g} M, {charge:g} C/m2", fontsize=10)
    axes.flat[0].legend(fontsize=8)
    figure.supxlabel("z in nm")
    figure.supylabel("density in M (bands: simulated, one standard error)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DEFAULT)
    parser.add_argument("--steps", type=int, default=Training().steps)
    parser.add_argument("--dropout", type=float, default=DROPOUT)
    parser.add_argument("--plain", action="store_true", help="targets in M, not per M of salt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--random-only", action="store_true", help="skip the splits by concentration"
    )
    parser.add_argument("--train", type=int, help="most simulations to train with a random fifth")
    parser.add_argument("--plot", type=Path, help="file to draw to")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    recorded, begun_s = read(args.data), time.monotonic()
    how = Training(args.steps, dropout=args.dropout, seed=args.seed, per_salt=not args.plain)

    train, test = random_split(len(recorded.points), 0.2, args.seed)
    train = train[: args.train]
    predicted = by_network(recorded, train, test, how)
    if args.plot:
        plot(recorded, test, predicted, args.plot)
    rows = {"random fifth": judge(recorded, test, predicted)}
    rows["random fifth, polynomial"] = judge(recorded, test, by_polynomial(recorded, train, test))
    for value, (train, test) in salt_splits(recorded).items() if not args.random_only else ():
        network = judge(recorded, test, by_network(recorded, train, test, how))
        polynomial = judge(recorded, test, by_polynomial(recorded, train, test))
        rows |= {f"{value:g} M": network, f"{value:g} M, polynomial": polynomial}
    _show(rows, time.monotonic() - begun_s, as_json=args.json)


def _show(rows: dict[str, dict[str, float]], took_s: float, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"took_s": took_s, **rows}))
        return
    head = "".join(f"  {name} (sigmas, noise)" for name in NAMES)
    print(f"{'held out':25} profile{head}")
    for name, row in rows.items():
        cells = "".join(
            f"  {row[mark]:7.2%} ({row[f'{mark}_sigmas']:5.1f}, {row[f'{mark}_noise']:5.2%})"
            for mark in NAMES
        )
        print(f"{name:25} {row['profile']:7.2%}{cells}")
    print(f"{took_s:.0f} s")


if __name__ == "__main__":
    main()
