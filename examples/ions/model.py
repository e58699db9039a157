"""Ions between two charged walls: how many there are, and what energy they have.

The primitive model: water is a medium of permittivity 80 at 298 K, ions are soft spheres with a
charge, walls are smooth planes at ``-L/2`` and ``L/2``, unpolarised and evenly charged, and the box
repeats in x and y. Lengths are in nm, energies in kT, concentrations in M, charge in C/m2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BJERRUM_NM = 0.714
PER_NM3_AND_MOLAR = 0.602214  # ions in a cubic nanometre at 1 M
ELEMENTARY_C_PER_M2 = 0.1602177  # one elementary charge on a square nanometre
_CLOSEST = 0.25  # of a diameter; nearer pairs have the energy of this distance, which is huge


@dataclass(frozen=True, slots=True)
class Slab:
    """What is simulated.

    Args:
        length_nm: between the walls.
        salt_molar: negative ions of the salt in the volume between the walls; 0 for none.
        charge_c_per_m2: of each wall; 0 for none.
        diameter_nm: of the ions.
        positive: valency of the positive ions.
        negative: valency of the negative ones, below 0.
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
                f"walls {self.length_nm} nm apart hold no ions of {self.diameter_nm} nm; give a "
                "length of more than two diameters"
            )
        if self.salt_molar < 0 or self.positive < 1 or self.negative > -1:
            raise ValueError(
                f"salt of {self.salt_molar} M with valencies {self.positive} and {self.negative} "
                "cannot be; give a concentration of at least 0, and valencies such as 1 and -1"
            )


@dataclass(frozen=True, slots=True)
class Box:
    """What can be simulated: whole ions, neutral as a whole.

    Args:
        slab: what was asked.
        side_nm: of the box in x and y.
        positive: number of positive ions.
        negative: number of negative ones.
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
        """Charge of all ions, in elementary charges."""
        return self.positive * self.slab.positive + self.negative * self.slab.negative

    @property
    def charge_c_per_m2(self) -> float:
        """Charge of each wall that makes these ions neutral; close to what was asked."""
        return -self.ion_charge * ELEMENTARY_C_PER_M2 / (2 * self.side_nm**2)

    def per_ion_molar(self, thickness_nm: float) -> float:
        """Return the concentration that one ion makes in a layer of the box."""
        return 1.0 / (self.side_nm**2 * thickness_nm * PER_NM3_AND_MOLAR)


def box_of(slab: Slab, ions: int) -> Box:
    """Return a box of about so many ions, in which there are whole numbers of all kinds.

    The concentration is met exactly. The charge of the walls is what a whole number of
    counter-ions balances; of boxes with three quarters to all of the ions, the closest is taken.
    """
    walls = -2 * slab.charge_c_per_m2 / ELEMENTARY_C_PER_M2  # counter-charge on 1 nm2
    valency = slab.positive if walls > 0 else slab.negative
    common = math.gcd(slab.positive, -slab.negative)
    anions, cations = slab.positive // common, -slab.negative // common  # of one unit of salt
    if not slab.salt_molar:
        counter = ions if walls else 0
        side_nm = math.sqrt(counter * valency / walls) if walls else slab.length_nm
        return _with_counter(slab, side_nm, 0, 0, counter)
    area_nm2 = anions / (
        slab.salt_molar * PER_NM3_AND_MOLAR * slab.length_nm
    )  # for one unit of salt
    most = max(int(ions / (anions + cations + area_nm2 * walls / valency)), 1)

    def doubt(units: int) -> float:
        exact = units * area_nm2 * walls / valency
        return abs(round(exact) - exact) / max(exact, 1e-9)

    units = min(range(most, most * 3 // 4, -1), key=doubt)
    counter = round(units * area_nm2 * walls / valency)
    side_nm = math.sqrt(units * area_nm2)
    return _with_counter(slab, side_nm, units * cations, units * anions, counter)


def _with_counter(slab: Slab, side_nm: float, positive: int, negative: int, counter: int) -> Box:
    if slab.charge_c_per_m2 < 0:
        return Box(slab, side_nm, positive + counter, negative)
    return Box(slab, side_nm, positive, negative + counter)


def valencies(box: Box) -> Tensor:
    """Return the ions' valencies, the positive ones first, shape ``(ions,)``."""
    slab = box.slab
    return torch.tensor(
        [float(slab.positive)] * box.positive + [float(slab.negative)] * box.negative
    )


def repulsion(distance2: Tensor, sigma_nm: float) -> Tensor:
    """Return the shifted Lennard-Jones energy that only repels, 1 kT at ``sigma_nm``.

    Args:
        distance2: squares of distances, nm2, above 0.
        sigma_nm: the energy ends at 2^(1/6) of it.
    """
    sixth = (sigma_nm * sigma_nm / distance2) ** 3
    return (4 * sixth * (sixth - 1) + 1) * (sixth > 0.5)


def far_images(height: Tensor) -> Tensor:
    """Return the energy with all repetitions of a unit charge but the nearest, times the side.

    The repetitions are smeared to a charged sheet with a square hole (the method of charged
    sheets, as in the molecular dynamics this is compared with): the potential of an infinite sheet
    less that on the axis of a square. Without the charge's own constant, which cancels in a
    neutral box.

    Args:
        height: distances in z in units of the side of the box, not negative.
    """
    square = height * height
    root = (square + 0.5).sqrt_()
    inner = (root + 0.5).div_((square + 0.25).sqrt_()).log_()
    return -4.0 * (inner + height * torch.atan(4.0 * height * root))


def pair_energies(delta: Tensor, charges: Tensor, box: Box) -> Tensor:
    """Return the energies of pairs of ions, in kT; consumes ``delta``.

    Args:
        delta: distances in x, y and z in nm, ``(3, ...)``; taken to the nearest repetition.
        charges: products of the pairs' valencies, to be broadcast over the other dimensions.
        box: that the ions are in.
    """
    side_nm, diameter_nm = box.side_nm, box.slab.diameter_nm
    delta[:2] -= side_nm * torch.round(delta[:2] / side_nm)
    distance2 = (delta * delta).sum(0).clamp_(min=(_CLOSEST * diameter_nm) ** 2)
    coulomb = distance2.rsqrt() + far_images(delta[2].abs() / side_nm) / side_nm
    return BJERRUM_NM * charges * coulomb + repulsion(distance2, diameter_nm)


def wall_energies(z_nm: Tensor, slab: Slab) -> Tensor:
    """Return the energies of ions with both walls, in kT; infinite outside.

    A wall repels like an ion whose surface it is: ``sigma`` is half a diameter. The electric
    fields of two walls with the same charge cancel between them.
    """
    gap_nm = slab.length_nm / 2 - z_nm.abs()
    energy = repulsion(gap_nm.clamp(min=1e-3) ** 2, slab.diameter_nm / 2)
    return torch.where(gap_nm > 0, energy, math.inf)
