"""Molecular dynamics of ions: exact forces, kept energy, the right temperature and profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from examples.ions.dynamics import Array, Thermostat, advance, forces
from examples.ions.model import Box, Slab, box_of, pair_energies, valencies, wall_energies
from examples.ions.recorded import compared, read
from examples.ions.simulate import Settings, Simulation

from tests.messages import raises_message

SLAB = Slab(3.0, 0.5, -0.02)
BOX = box_of(SLAB, 16)


def energies(at_nm: torch.Tensor, box: Box = BOX) -> torch.Tensor:
    """Return the potential energy of each replica, from the model."""
    charge = valencies(BOX).double()
    one, other = torch.triu_indices(BOX.ions, BOX.ions, 1)
    delta = at_nm[:, :, one] - at_nm[:, :, other]
    pairs = pair_energies(delta.clone(), charge[one] * charge[other], box)
    return pairs.sum(-1) + wall_energies(at_nm[2], SLAB).sum(-1)


def total(at_nm: Array, velocity: Array, box: Box) -> Array:
    potential: Array = energies(torch.from_numpy(at_nm), box).numpy()
    return np.asarray(potential + 0.5 * (velocity**2).sum((0, 2)))


@pytest.fixture(scope="module")
def places_nm() -> Array:
    """Places without overlaps, of four replicas."""
    run = Simulation(SLAB, Settings(ions=16, replicas=4, equilibrate=20, sweeps=0), 0)
    run.advance(20)
    found: Array = run.state_dict()["at_nm"].double().numpy()
    return found


def velocities(shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(1).standard_normal(shape)


def test_forces_are_the_derivatives_of_the_energies(places_nm: Array) -> None:
    at_nm = torch.from_numpy(places_nm.copy()).requires_grad_()
    energies(at_nm).sum().backward()  # type: ignore[no-untyped-call]

    found = forces(places_nm, BOX)

    assert np.abs(found).max() > 1.0
    assert at_nm.grad is not None
    np.testing.assert_allclose(found, -at_nm.grad.numpy(), rtol=1e-9, atol=1e-9)


def test_ions_push_each_other_with_equal_and_opposite_forces(places_nm: Array) -> None:
    inside = forces(places_nm, BOX)[:2].sum(-1)  # walls act in z only

    np.testing.assert_allclose(inside, 0.0, atol=1e-9)


def test_without_friction_the_error_of_the_energy_falls_with_the_square_of_the_step(
    places_nm: Array,
) -> None:
    velocity, still = velocities(places_nm.shape), np.random.default_rng(0)
    # The force jumps where another image becomes the nearest, so no ion comes that far here.
    box = replace(BOX, side_nm=40.0)
    begun = total(places_nm, velocity, box)

    errors = []
    for step in (0.002, 0.001):
        here, now, off = places_nm, velocity, []
        for _ in range(20):
            how = Thermostat(step, friction=0.0)
            here, now = advance(here, now, box, round(0.01 / step), still, how)
            off.append(total(here, now, box) - begun)
        errors.append(float(np.sqrt(np.square(off).mean())))

    assert errors[0] < 0.05, "in kT, of some 20 kT of kinetic energy"
    assert errors[0] / errors[1] == pytest.approx(4.0, rel=0.1)


def test_without_friction_time_runs_backwards_too(places_nm: Array) -> None:
    velocity, how = velocities(places_nm.shape), Thermostat(friction=0.0)

    there, then = advance(places_nm, velocity, BOX, 50, np.random.default_rng(0), how)
    back, _ = advance(there, -then, BOX, 50, np.random.default_rng(0), how)

    assert np.abs(there - places_nm).max() > 0.05
    np.testing.assert_allclose(back, places_nm, atol=1e-6)


def test_with_friction_each_direction_has_half_a_kt(places_nm: Array) -> None:
    random, squares = np.random.default_rng(2), []
    at_nm, velocity = places_nm, 2.0 * velocities(places_nm.shape)  # four times too hot
    for look in range(120):
        at_nm, velocity = advance(at_nm, velocity, BOX, 20, random, Thermostat(friction=5.0))
        if look >= 60:
            squares.append((velocity**2).mean((1, 2)))

    # 60 looks at 64 ions within 3 units of time: some 2,000 independent ones, off by 0.03.
    assert np.mean(squares, axis=0).tolist() == pytest.approx([1.0, 1.0, 1.0], abs=0.12)


def test_an_ion_in_a_wall_is_an_error(places_nm: Array) -> None:
    beyond = places_nm.copy()
    beyond[2, 1, 3] = 1.51

    with raises_message(ArithmeticError):
        forces(beyond, BOX)


def test_an_unknown_method_is_refused() -> None:
    with raises_message(ValueError):
        Settings(method="newton")


def test_dynamics_and_monte_carlo_have_the_same_profiles() -> None:
    found = []
    for method, sweeps in (("monte-carlo", 60), ("dynamics", 120)):
        run = Simulation(SLAB, Settings(24, 16, 30, sweeps, bins=10, method=method), 3)
        run.advance(30 + sweeps)
        found.append(run.profiles())
    one, other = found

    inner = slice(1, -1)
    error = torch.hypot(one.error_molar, other.error_molar)[:, inner]
    off = (one.density_molar - other.density_molar)[:, inner] / error
    assert (error / one.density_molar[:, inner]).mean() < 0.15, "a large error proves nothing"
    assert off.square().mean() < 2.0, "squares of deviations are one squared error on average"


def test_dynamics_report_their_temperature() -> None:
    run = Simulation(SLAB, Settings(24, 16, 5, 5, method="dynamics"), 0)
    run.advance(10)

    assert run.temperature == pytest.approx(1.0, abs=0.15)
    assert 0.2 < run.accepted < 1.0, "of the first sweeps, which are Monte Carlo"


@pytest.mark.data
def test_dynamics_agree_with_recorded_molecular_dynamics(data_root: Path) -> None:
    point, settings = (4.0, 0.5, -0.02), Settings(40, 16, 40, 100, bins=20, method="dynamics")
    points, *recorded = read(data_root / "ionic-density", settings.bins)
    (n,) = torch.nonzero((points - torch.tensor(point)).abs().amax(-1) < 1e-6)[:, 0].tolist()
    run = Simulation(replace(SLAB, length_nm=point[0]), settings, 0)
    run.advance(140)

    for differences in compared(run, recorded[0][n], recorded[1][n]):
        for place, (off, error) in differences.items():
            assert error < 0.15, place
            assert abs(off) < (1.5 if place == "profile" else 3.0) * error, place
