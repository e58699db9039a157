"""Molecular dynamics of the ions: velocity Verlet with a Langevin thermostat, in NumPy.

A step is B-A-O-A-B of Leimkuhler and Matthews (2013): half a kick by the forces, half a drift,
friction with noise, half a drift, half a kick. Without friction it is velocity Verlet (Swope et al.
1982). Forces are the exact derivatives of the energies in `model`, and a test compares both.

The unit of time is the one in which kT, nm and the mass of an ion are 1: about 3 ps for sodium
ions (23 u) at 298 K. Water acts only through its permittivity and the thermostat.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, sqrt

import numpy as np
import numpy.typing as npt
from examples.ions.model import BJERRUM_NM, Box, valencies

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Thermostat:
    """How ions move.

    Args:
        step: Time of a step. The walls are the stiffest part: they turn an ion round within 0.1.
        friction: Friction of the water per unit of time. 0 keeps the energy instead of the
            temperature.
    """

    step: float = 0.0025
    friction: float = 1.0


def forces(at_nm: Array, box: Box) -> Array:
    """Return the forces on the ions in kT per nm.

    Args:
        at_nm: Places in x, y and z, ``(3, replicas, ions)``. They may lie outside the box in x
            and y.
        box: The simulation box.

    Cost:
        ``O(ions^2)`` per replica, about 0.4 ms for 100 ions on one core.
    """
    charge = valencies(box).numpy().astype(np.float64)
    charges = BJERRUM_NM * np.multiply.outer(charge, charge)
    total = np.empty_like(at_nm)
    for replica in range(at_nm.shape[1]):  # one at a time, so that its pairs stay in the cache
        total[:, replica] = _of_pairs(at_nm[:, replica], charges, box)
    total[2] += _of_walls(at_nm[2], box)
    return total


def _of_pairs(at_nm: Array, charges: Array, box: Box) -> Array:
    """Return the forces of all ions of a replica on each other, ``(3, ions)``."""
    side_nm = box.side_nm
    delta = at_nm[:, :, None] - at_nm[:, None, :]
    delta[:2] -= side_nm * np.rint(delta[:2] / side_nm)
    distance2 = np.einsum("dij,dij->ij", delta, delta)
    np.fill_diagonal(distance2, np.inf)
    inverse2 = 1.0 / distance2
    sixth = (box.slab.diameter_nm**2 * inverse2) ** 3
    strength = charges * np.sqrt(inverse2) + _repulsion(sixth)
    pairs: Array = np.einsum("dij,ij->di", delta, strength * inverse2)
    # All images but the nearest count as charged sheets with a square hole; see `far_images`.
    height = delta[2] / side_nm
    angle = np.arctan(4.0 * height * np.sqrt(height * height + 0.5))
    pairs[2] += 4.0 / side_nm**2 * np.einsum("ij,ij->i", charges, angle)
    return pairs


def _of_walls(z_nm: Array, box: Box) -> Array:
    """Return the forces of both walls in z."""
    gap_nm = box.slab.length_nm / 2 - np.abs(z_nm)
    if not gap_nm.min(initial=np.inf) > 0.0:
        raise ArithmeticError(
            "an ion has passed through a wall: the time step is too long, or ions overlapped at "
            "the start; take a shorter step"
        )
    sixth = (box.slab.diameter_nm / 2 / gap_nm) ** 6
    return np.asarray(-np.sign(z_nm) * _repulsion(sixth) / gap_nm)


def _repulsion(sixth: Array) -> Array:
    """Return the force of the energy in `repulsion` times the distance."""
    return np.asarray(24.0 * sixth * (2.0 * sixth - 1.0) * (sixth > 0.5))


def advance(
    at_nm: Array,
    velocity: Array,
    box: Box,
    steps: int,
    random: np.random.Generator,
    thermostat: Thermostat = Thermostat(),
) -> tuple[Array, Array]:
    """Return places and velocities after some steps.

    Args:
        at_nm: Places, ``(3, replicas, ions)``.
        velocity: Velocities, of the same shape, in nm per unit of time.
        box: The simulation box.
        steps: Number of steps.
        random: For the noise of the thermostat; not used without friction.
        thermostat: Time step and friction.

    Raises:
        ArithmeticError: An ion has passed through a wall.
    """
    step = thermostat.step
    kept = exp(-thermostat.friction * step)
    noise = sqrt(1.0 - kept * kept)
    pull = forces(at_nm, box)
    for _ in range(steps):
        velocity = velocity + step / 2 * pull
        at_nm = at_nm + step / 2 * velocity
        if noise:
            velocity = kept * velocity + noise * random.standard_normal(velocity.shape)
        at_nm = at_nm + step / 2 * velocity
        pull = forces(at_nm, box)
        velocity = velocity + step / 2 * pull
    return at_nm, velocity
