"""Density profiles of ions between two walls, in parallel replicas.

    python -m examples.ions.simulate --length 4 --salt 0.5 --charge -0.01
    python -m examples.ions.simulate --length 4 --salt 0.5 --charge -0.01 --method dynamics

Replicas are independent boxes with the same ions and different random numbers. There are two
methods for the same distribution.

*Monte Carlo*: A move proposes a new place for the same ion in all replicas. It is a step of up to
`Settings.step_nm` in each direction or, one time in four, any place in the box, so that ions can
change sides. Each replica accepts or rejects the move by the Metropolis criterion (Metropolis et
al. 1953).

*Dynamics*: A sweep is 10 time steps of Langevin dynamics; see `dynamics`. The first five sweeps are
Monte Carlo, because the initial places may overlap.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples.ions.dynamics import advance
from examples.ions.files import read_if_there, replace_whole
from examples.ions.model import (
    Box,
    Slab,
    box_of,
    pair_energies,
    valencies,
    wall_energies,
)
from torch import Tensor

METHODS = ("monte-carlo", "dynamics")
_ANYWHERE = 0.25  # of the moves
_APART = 5  # sweeps until no ions overlap
_STEPS = 10  # time steps of a sweep; longer ones would give hardly more independent samples


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a simulation.

    Args:
        ions: Approximate number of ions in a box.
        replicas: Number of independent boxes.
        equilibrate: Sweeps before sampling starts. A sweep proposes one move for each ion, or is
            10 time steps of dynamics.
        sweeps: Sweeps after equilibration.
        every: Sweeps between samples of the profile.
        bins: Bins of a profile, from wall to wall.
        step_nm: Longest step in each direction of a Monte Carlo move.
        method: One of `METHODS`.
    """

    ions: int = 100
    replicas: int = 64
    equilibrate: int = 40
    sweeps: int = 120
    every: int = 1
    bins: int = 100
    step_nm: float = 0.5
    method: str = METHODS[0]

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"unknown method {self.method!r}: expected {' or '.join(METHODS)}")


@dataclass(frozen=True, slots=True)
class Profiles:
    """The result: density profiles of both kinds of ions, positive ions first.

    Args:
        z_nm: Centres of the bins, ``(bins,)``.
        density_molar: Densities, ``(2, bins)``.
        error_molar: Their standard errors from the variance between replicas, ``(2, bins)``.
        charge_c_per_m2: Charge of each wall in the simulation.
    """

    z_nm: Tensor
    density_molar: Tensor
    error_molar: Tensor
    charge_c_per_m2: float


class Simulation:
    """A simulation that can be saved after any sweep and resumed with bit-identical results.

    Args:
        slab: The system to simulate.
        settings: Settings of the simulation.
        seed: Seed of the initial places and of all moves.
    """

    def __init__(self, slab: Slab, settings: Settings, seed: int) -> None:
        self.box, self.settings = box_of(slab, settings.ions), settings
        self.sweeps, self._samples, self._accepted = 0, 0, 0.0
        self._random = torch.Generator().manual_seed(seed)
        self._valencies = valencies(self.box)
        self._counts = torch.zeros(settings.replicas, 2, settings.bins, dtype=torch.int64)
        # Initial places may overlap. The overlaps disappear after a few sweeps.
        shape = (3, settings.replicas, self.box.ions)
        self._at_nm = self._anywhere(torch.rand(shape, generator=self._random))
        self._velocity = torch.zeros(0)
        if settings.method == "dynamics":
            self._at_nm = self._at_nm.double()
            self._velocity = torch.randn(shape, generator=self._random, dtype=torch.float64)

    @property
    def done(self) -> bool:
        """Whether all sweeps are done."""
        return self.sweeps >= self.settings.equilibrate + self.settings.sweeps

    @property
    def accepted(self) -> float:
        """Fraction of Monte Carlo moves that were accepted."""
        sweeps = min(self.sweeps, _APART) if len(self._velocity) else self.sweeps
        return self._accepted / max(sweeps, 1)

    @property
    def temperature(self) -> float:
        """Mean of the squared velocities now, which is 1 on average; not a number without ions."""
        return float(self._velocity.square().mean())

    @torch.no_grad()
    def advance(self, sweeps: int) -> None:
        """Run ``sweeps`` sweeps, or those that remain."""
        for _ in range(sweeps):
            if self.done:
                return
            self.sweep()
            self.sweeps += 1
            if self.sweeps > self.settings.equilibrate and self.sweeps % self.settings.every == 0:
                self._sample()

    def profiles(self) -> Profiles:
        """Return the profiles so far. Without samples, all densities are 0."""
        settings, length_nm = self.settings, self.box.slab.length_nm
        thickness_nm = length_nm / settings.bins
        per_count_molar = self.box.per_ion_molar(thickness_nm) / max(self._samples, 1)
        of_replicas_molar = self._counts.double() * per_count_molar
        # Replicas are independent, so each one is a block.
        error_molar = of_replicas_molar.std(0) / settings.replicas**0.5
        z_nm = (torch.arange(settings.bins, dtype=torch.float64) + 0.5) * thickness_nm
        return Profiles(
            z_nm - length_nm / 2, of_replicas_molar.mean(0), error_molar, self.box.charge_c_per_m2
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state as tensors and plain values."""
        return {
            "slab": asdict(self.box.slab),
            "settings": asdict(self.settings),
            "sweeps": self.sweeps,
            "samples": self._samples,
            "accepted": self._accepted,
            "at_nm": self._at_nm.clone(),
            "velocity": self._velocity.clone(),
            "counts": self._counts.clone(),
            "random": self._random.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`.

        Raises:
            ValueError: The state belongs to another simulation. This one is unchanged.
        """
        mine = {"slab": asdict(self.box.slab), "settings": asdict(self.settings)}
        if {name: state[name] for name in mine} != mine:
            raise ValueError(
                f"the saved state belongs to {state['slab']} and {state['settings']}, but this "
                f"simulation has {mine}; resume it with the settings that it was saved with"
            )
        self.sweeps, self._samples = state["sweeps"], state["samples"]
        self._accepted = state["accepted"]
        self._at_nm, self._counts = state["at_nm"].clone(), state["counts"].clone()
        self._velocity = state["velocity"].clone()
        self._random.set_state(state["random"])

    def _anywhere(self, part: Tensor) -> Tensor:
        """Map numbers from 0 to 1 to places in nm, with coordinates in the first dimension."""
        slab = self.box.slab
        sides_nm = [self.box.side_nm] * 2 + [slab.length_nm - slab.diameter_nm]
        return (part - 0.5) * torch.tensor(sides_nm).view(3, *[1] * (part.dim() - 1))

    def sweep(self) -> None:
        """Move every ion: by Monte Carlo, or by 10 steps of dynamics once no ions overlap."""
        if self.settings.method == "dynamics" and self.sweeps >= _APART:
            # The state of one generator determines the whole run.
            seed = int(torch.randint(2**62, (), generator=self._random))
            random = np.random.default_rng(seed)
            at_nm, velocity = self._at_nm.numpy(), self._velocity.numpy()
            at_nm, velocity = advance(at_nm, velocity, self.box, _STEPS, random)
            self._at_nm, self._velocity = torch.from_numpy(at_nm), torch.from_numpy(velocity)
        else:
            self._metropolis()

    def _metropolis(self) -> None:
        shape = (3, self.box.ions, self.settings.replicas)
        part = torch.rand(shape, generator=self._random)
        steps_nm, places_nm = (2 * part - 1) * self.settings.step_nm, self._anywhere(part)
        far = torch.rand(shape[1:], generator=self._random) < _ANYWHERE
        odds = torch.rand(shape[1:], generator=self._random).log_()
        made = torch.zeros(())
        for ion in range(self.box.ions):
            here = self._at_nm[:, :, ion]
            there = torch.where(far[ion], places_nm[:, ion], here + steps_nm[:, ion])
            rise = self._rise(ion, here, there)
            moves = odds[ion] < -rise
            self._at_nm[:, :, ion] = torch.where(moves, there, here)
            made += moves.float().mean()
        side_nm = self.box.side_nm
        self._at_nm[:2] -= side_nm * torch.round(self._at_nm[:2] / side_nm)
        self._accepted += float(made) / max(self.box.ions, 1)

    def _rise(self, ion: int, here: Tensor, there: Tensor) -> Tensor:
        """Return the change of energy by a move in each replica, in kT."""
        both = torch.stack((here, there), dim=1)
        charges = self._valencies[ion] * self._valencies
        pairs = pair_energies(self._at_nm[:, None] - both[..., None], charges, self.box)
        pairs[..., ion] = 0.0  # the pair of the ion with itself
        energy = pairs.sum(-1) + wall_energies(both[2], self.box.slab)
        return energy[1] - energy[0]

    def _sample(self) -> None:
        bins, length_nm = self.settings.bins, self.box.slab.length_nm
        found = ((self._at_nm[2] / length_nm + 0.5) * bins).long().clamp_(0, bins - 1)
        ones = torch.ones_like(found)
        cut = self.box.positive
        self._counts[:, 0].scatter_add_(1, found[:, :cut], ones[:, :cut])
        self._counts[:, 1].scatter_add_(1, found[:, cut:], ones[:, cut:])
        self._samples += 1


def contact_molar(profiles: Profiles, box: Box) -> Tensor:
    """Return the densities half a diameter from a wall, averaged over both walls, ``(2,)``."""
    slab = box.slab
    at_nm = slab.length_nm / 2 - slab.diameter_nm / 2
    bins = len(profiles.z_nm)
    both = (profiles.density_molar + profiles.density_molar.flip(-1)) / 2
    place = (at_nm / slab.length_nm + 0.5) * bins - 0.5
    low = int(place)
    return torch.lerp(both[:, low], both[:, low + 1], place - low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--length", type=float, default=4.0, help="distance between the walls in nm"
    )
    parser.add_argument("--salt", type=float, default=0.5, help="concentration in M")
    parser.add_argument("--charge", type=float, default=-0.01, help="of each wall in C/m2")
    parser.add_argument("--diameter", type=float, default=0.415, help="of the ions in nm")
    parser.add_argument("--ions", type=int, default=Settings().ions, help="approximate number")
    parser.add_argument("--replicas", type=int, default=Settings().replicas)
    parser.add_argument("--sweeps", type=int, default=Settings().sweeps)
    parser.add_argument("--method", choices=METHODS, default=METHODS[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="file to resume from and to save to")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    slab = Slab(args.length, args.salt, args.charge, args.diameter)
    settings = Settings(args.ions, args.replicas, sweeps=args.sweeps, method=args.method)
    run = Simulation(slab, settings, args.seed)
    state = read_if_there(args.state) if args.state else None
    if state is not None:
        run.load_state_dict(state)
    begun_s, first = time.monotonic(), run.sweeps
    while not run.done:
        run.advance(10)
        if args.state:
            replace_whole(args.state, run.state_dict())
    _show(run, time.monotonic() - begun_s, first, as_json=args.json)


def _show(run: Simulation, took_s: float, first: int, *, as_json: bool) -> None:
    box, profiles = run.box, run.profiles()
    if as_json:
        tables = {
            n: getattr(profiles, n).tolist() for n in ("z_nm", "density_molar", "error_molar")
        }
        print(json.dumps({**asdict(box), **tables, "took_s": took_s}))
        return
    ended = f"{run.accepted:.0%} of the moves accepted"
    if run.settings.method == "dynamics":
        ended = f"temperature {run.temperature:.3f} at the end"
    print(
        f"{box.positive} positive and {box.negative} negative ions in {box.side_nm:.2f} nm squared,"
        f" walls of {box.charge_c_per_m2:.5f} C/m2; sweeps {first} to {run.sweeps} in"
        f" {took_s:.1f} s, {ended}"
    )
    print("z_nm  positive_M  error_molar  negative_M  error_molar")
    rows = zip(profiles.z_nm, *profiles.density_molar, *profiles.error_molar, strict=True)
    for z_nm, positive, negative, p_error, n_error in rows:
        print(f"{z_nm:6.3f} {positive:8.4f} {p_error:8.4f} {negative:8.4f} {n_error:8.4f}")


if __name__ == "__main__":
    main()
