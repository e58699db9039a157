"""Ions between two charged walls: their numbers and energies in the primitive model.

Water is a medium of permittivity 80 at 298 K. Ions are charged soft spheres. Walls are smooth,
unpolarised, uniformly charged planes at ``-L/2`` and ``L/2``. The box is periodic in x and y.
Lengths are in nm, energies in kT, concentrations in M, wall charges in C/m2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BJERRUM_NM = 0.714
PER_NM3_AND_MOLAR = 0.602214  # ions in a cubic nanometre at 1 M
ELEMENTARY_C_PER_M2 = 0.1602177  # one elementary charge per square nanometre
_CLOSEST = 0.25  # of a diameter; closer pairs get the energy at this distance, which is huge


@dataclass(frozen=True, slots=True)
class Slab:
    """The physical system: an electrolyte between two walls.

    Args:
        length_nm: Distance between the walls.
        salt_molar: Concentration of the salt's negative ions between the walls; may be 0.
        charge_c_per_m2: Charge of each wall; may be 0.
        diameter_nm: Diameter of the ions.
        positive: Valency of the positive ions.
        negative: Valency of the negative ions, below 0.
    """

    length_nm: float
    salt_molar: float
    charge_c_per_m2: float
    diameter_nm: float = 0.415
    positive: int = 1
    negative: int = -1

    def __post_init__(self) -> None:
        if not self.length_nm > 2 * self.diameter_nm > 0:
            raise ValueError(
                f"invalid length {self.length_nm} nm for ions of {self.diameter_nm} nm: expected "
                "more than two diameters, and a diameter above 0"
            )
        if self.salt_molar < 0 or self.positive < 1 or self.negative > -1:
            raise ValueError(
                f"invalid salt of {self.salt_molar} M with valencies {self.positive} and "
                f"{self.negative}: expected at least 0 M and valencies such as 1 and -1"
            )


@dataclass(frozen=True, slots=True)
class Box:
    """The simulation box: whole numbers of ions, electrically neutral with the walls.

    Args:
        slab: The system that the box approximates.
        side_nm: Side of the box in x and y.
        positive: Number of positive ions.
        negative: Number of negative ions.
    """

    slab: Slab
    side_nm: float
    positive: int
    negative: int

    @property
    def ions(self) -> int:
        return self.positive + self.negative

    @property
    def ion_charge(self) -> int:
        """Total charge of the ions, in elementary charges."""
        return self.positive * self.slab.positive + self.negative * self.slab.negative

    @property
    def charge_c_per_m2(self) -> float:
        """Charge of each wall that neutralises the ions. It is close to that of the slab."""
        return -self.ion_charge * ELEMENTARY_C_PER_M2 / (2 * self.side_nm**2)

    def per_ion_molar(self, thickness_nm: float) -> float:
        """Return the concentration of one ion in a layer of the box."""
        return 1.0 / (self.side_nm**2 * thickness_nm * PER_NM3_AND_MOLAR)


def box_of(slab: Slab, ions: int) -> Box:
    """Return a box with about ``ions`` ions and a whole number of each kind.

    The concentration is exact. The wall charge is that which a whole number of counter-ions
    balances. Of the boxes with 75 % to 100 % of ``ions``, this is the one with the closest charge.
    """
    walls = -2 * slab.charge_c_per_m2 / ELEMENTARY_C_PER_M2  # counter-charge per nm2
    valency = slab.positive if walls > 0 else slab.negative
    common = math.gcd(slab.positive, -slab.negative)
    anions, cations = slab.positive // common, -slab.negative // common  # per formula unit of salt
    if not slab.salt_molar:
        counter = ions if walls else 0
        side_nm = math.sqrt(counter * valency / walls) if walls else slab.length_nm
        return _with_counter(slab, side_nm, 0, 0, counter)
    area_nm2 = anions / (slab.salt_molar * PER_NM3_AND_MOLAR * slab.length_nm)  # per formula unit
    most = max(int(ions / (anions + cations + area_nm2 * walls / valency)), 1)

    def deviation(units: int) -> float:
        exact = units * area_nm2 * walls / valency
        return abs(round(exact) - exact) / max(exact, 1e-9)

    units = min(range(most, most * 3 // 4, -1), key=deviation)
    counter = round(units * area_nm2 * walls / valency)
    side_nm = math.sqrt(units * area_nm2)
    return _with_counter(slab, side_nm, units * cations, units * anions, counter)


def _with_counter(slab: Slab, side_nm: float, positive: int, negative: int, counter: int) -> Box:
    if slab.charge_c_per_m2 < 0:
        return Box(slab, side_nm, positive + counter, negative)
    return Box(slab, side_nm, positive, negative + counter)


def valencies(box: Box) -> Tensor:
    """Return the valencies of the ions, positive ions first, shape ``(ions,)``."""
    slab = box.slab
    return torch.tensor(
        [float(slab.positive)] * box.positive + [float(slab.negative)] * box.negative
    )


def repulsion(distance2: Tensor, sigma_nm: float) -> Tensor:
    """Return the shifted, purely repulsive Lennard-Jones energy (WCA), 1 kT at ``sigma_nm``.

    Args:
        distance2: Squared distances in nm2, above 0.
        sigma_nm: The energy is 0 beyond 2^(1/6) times this length.
    """
    sixth = (sigma_nm * sigma_nm / distance2) ** 3
    return (4 * sixth * (sixth - 1) + 1) * (sixth > 0.5)


def far_images(height: Tensor) -> Tensor:
    """Return the energy with all periodic images of a unit charge but the nearest, times the side.

    The charged-sheet method, also used by the reference molecular dynamics, smears the images to a
    sheet with a square hole. Its potential is that of an infinite sheet minus that on the axis of
    a square. The self-energy of the charge is omitted, because it cancels in a neutral box.

    Args:
        height: Distances in z in units of the side of the box, at least 0.
    """
    square = height * height
    root = (square + 0.5).sqrt_()
    inner = (root + 0.5).div_((square + 0.25).sqrt_()).log_()
    return -4.0 * (inner + height * torch.atan(4.0 * height * root))


def pair_energies(delta: Tensor, charges: Tensor, box: Box) -> Tensor:
    """Return the energies of pairs of ions in kT. Overwrites ``delta``.

    Args:
        delta: Differences in x, y and z in nm, ``(3, ...)``; wrapped to the nearest image.
        charges: Products of the valencies of each pair, broadcast over the other dimensions.
        box: The simulation box.
    """
    side_nm, diameter_nm = box.side_nm, box.slab.diameter_nm
    delta[:2] -= side_nm * torch.round(delta[:2] / side_nm)
    distance2 = (delta * delta).sum(0).clamp_(min=(_CLOSEST * diameter_nm) ** 2)
    coulomb = distance2.rsqrt() + far_images(delta[2].abs() / side_nm) / side_nm
    return BJERRUM_NM * charges * coulomb + repulsion(distance2, diameter_nm)


def wall_energies(z_nm: Tensor, slab: Slab) -> Tensor:
    """Return the energies of ions with both walls in kT, infinite outside the walls.

    A wall repels like the surface of an ion: ``sigma`` is half a diameter. Between two walls of
    equal charge, their electric fields cancel.
    """
    gap_nm = slab.length_nm / 2 - z_nm.abs()
    energy = repulsion(gap_nm.clamp(min=1e-3) ** 2, slab.diameter_nm / 2)
    return torch.where(gap_nm > 0, energy, math.inf)
