"""Density profiles of ions between two walls, by Metropolis Monte Carlo in many replicas at once.

python -m examples.ions.simulate --length 4 --salt 0.5 --charge -0.01

Every replica is a box of its own, with the same ions and other random numbers. One move tries
another place for the same ion in all replicas: a step of up to `Settings.step_nm` in each
direction or, one time in four, any place at all, which lets ions change sides. Where a replica's
energy does not rise by more than chance allows, the move is made (Metropolis et al. 1953).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
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

_ANYWHERE = 0.25  # of the moves


@dataclass(frozen=True, slots=True)
class Settings:
    """How a slab is simulated.

    Args:
        ions: about so many in a box.
        replicas: independent boxes.
        equilibrate: sweeps before anything counts; a sweep tries to move each ion once.
        sweeps: sweeps that count.
        every: sweeps from one sample of the profile to the next.
        bins: of a profile, from wall to wall.
        step_nm: longest step in each direction.
    """

    ions: int = 100
    replicas: int = 64
    equilibrate: int = 40
    sweeps: int = 120
    every: int = 1
    bins: int = 100
    step_nm: float = 0.5


@dataclass(frozen=True, slots=True)
class Profiles:
    """The result: densities of both kinds of ions, the positive ones first.

    Args:
        z_nm: middles of the bins, ``(bins,)``.
        density_molar: ``(2, bins)``.
        error_molar: standard errors of them, from the scatter of the replicas, ``(2, bins)``.
        charge_c_per_m2: of each wall, as it was simulated.
    """

    z_nm: Tensor
    density_molar: Tensor
    error_molar: Tensor
    charge_c_per_m2: float


class Simulation:
    """A simulation that can be put down at any sweep and taken up again, the same to the last bit.

    Args:
        slab: what is simulated.
        settings: how.
        seed: of the places where the ions begin, and of all moves.
    """

    def __init__(self, slab: Slab, settings: Settings, seed: int) -> None:
        self.box, self.settings = box_of(slab, settings.ions), settings
        self.sweeps, self._samples, self._accepted = 0, 0, 0.0
        self._random = torch.Generator().manual_seed(seed)
        self._valencies = valencies(self.box)
        self._counts = torch.zeros(settings.replicas, 2, settings.bins, dtype=torch.int64)
        # Anywhere, overlaps included: they are gone after a few sweeps.
        shape = (3, settings.replicas, self.box.ions)
        self._at_nm = self._anywhere(torch.rand(shape, generator=self._random))

    @property
    def done(self) -> bool:
        """Whether all sweeps are made."""
        return self.sweeps >= self.settings.equilibrate + self.settings.sweeps

    @property
    def accepted(self) -> float:
        """Part of the moves that were made."""
        return self._accepted / max(self.sweeps, 1)

    @torch.no_grad()
    def advance(self, sweeps: int) -> None:
        """Make so many sweeps, or as many as are left."""
        for _ in range(sweeps):
            if self.done:
                return
            self.sweep()
            self.sweeps += 1
            if self.sweeps > self.settings.equilibrate and self.sweeps % self.settings.every == 0:
                self._sample()

    def profiles(self) -> Profiles:
        """Return the profiles so far, zero without samples."""
        settings, length_nm = self.settings, self.box.slab.length_nm
        thickness_nm = length_nm / settings.bins
        per_count_molar = self.box.per_ion_molar(thickness_nm) / max(self._samples, 1)
        of_replicas_molar = self._counts.double() * per_count_molar
        # A replica is a block: nothing one does depends on another.
        error_molar = of_replicas_molar.std(0) / settings.replicas**0.5
        z_nm = (torch.arange(settings.bins, dtype=torch.float64) + 0.5) * thickness_nm
        return Profiles(
            z_nm - length_nm / 2, of_replicas_molar.mean(0), error_molar, self.box.charge_c_per_m2
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all that a restart needs, as tensors and plain values."""
        return {
            "slab": asdict(self.box.slab),
            "settings": asdict(self.settings),
            "sweeps": self.sweeps,
            "samples": self._samples,
            "accepted": self._accepted,
            "at_nm": self._at_nm.clone(),
            "counts": self._counts.clone(),
            "random": self._random.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: it was taken from another simulation; nothing has changed.
        """
        mine = {"slab": asdict(self.box.slab), "settings": asdict(self.settings)}
        if {name: state[name] for name in mine} != mine:
            raise ValueError(
                f"the state is of {state['slab']} and {state['settings']}, this is of {mine}; "
                "take it up with the settings that it was saved with"
            )
        self.sweeps, self._samples = state["sweeps"], state["samples"]
        self._accepted = state["accepted"]
        self._at_nm, self._counts = state["at_nm"].clone(), state["counts"].clone()
        self._random.set_state(state["random"])

    def _anywhere(self, part: Tensor) -> Tensor:
        """Return places in nm for numbers from 0 to 1, coordinates in the first dimension."""
        slab = self.box.slab
        sides_nm = [self.box.side_nm] * 2 + [slab.length_nm - slab.diameter_nm]
        return (part - 0.5) * torch.tensor(sides_nm).view(3, *[1] * (part.dim() - 1))

    def sweep(self) -> None:
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
        """Return the energy that a move costs in each replica, kT."""
        both = torch.stack((here, there), dim=1)
        charges = self._valencies[ion] * self._valencies
        pairs = pair_energies(self._at_nm[:, None] - both[..., None], charges, self.box)
        pairs[..., ion] = 0.0  # with itself
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
    """Return the densities half a diameter from a wall, the mean of both walls, ``(2,)``."""
    slab = box.slab
    at_nm = slab.length_nm / 2 - slab.diameter_nm / 2
    bins = len(profiles.z_nm)
    both = (profiles.density_molar + profiles.density_molar.flip(-1)) / 2
    place = (at_nm / slab.length_nm + 0.5) * bins - 0.5
    low = int(place)
    return torch.lerp(both[:, low], both[:, low + 1], place - low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=float, default=4.0, help="nm between the walls")
    parser.add_argument("--salt", type=float, default=0.5, help="M")
    parser.add_argument("--charge", type=float, default=-0.01, help="C/m2 on each wall")
    parser.add_argument("--diameter", type=float, default=0.415, help="nm")
    parser.add_argument("--sweeps", type=int, default=Settings().sweeps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="go on from here, and save here")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    slab = Slab(args.length, args.salt, args.charge, args.diameter)
    run = Simulation(slab, Settings(sweeps=args.sweeps), args.seed)
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
    print(
        f"{box.positive} positive and {box.negative} negative ions in {box.side_nm:.2f} nm squared,"
        f" walls of {box.charge_c_per_m2:.5f} C/m2; sweeps {first} to {run.sweeps} in"
        f" {took_s:.1f} s, {run.accepted:.0%} of the moves made"
    )
    print("z_nm  positive_M  error_molar  negative_M  error_molar")
    rows = zip(profiles.z_nm, *profiles.density_molar, *profiles.error_molar, strict=True)
    for z_nm, positive, negative, p_error, n_error in rows:
        print(f"{z_nm:6.3f} {positive:8.4f} {p_error:8.4f} {negative:8.4f} {n_error:8.4f}")


if __name__ == "__main__":
    main()
