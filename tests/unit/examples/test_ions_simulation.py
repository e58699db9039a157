"""The simulation of ions: neutral, symmetric, resumable, and equal to known solutions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from examples.ions.model import PER_NM3_AND_MOLAR, Slab, box_of, far_images
from examples.ions.recorded import read, rebinned
from examples.ions.simulate import METHODS, Profiles, Settings, Simulation, contact_molar
from hypothesis import given
from hypothesis import strategies as st

from tests.messages import raises_message

SMALL = Settings(ions=30, replicas=16, equilibrate=10, sweeps=20, bins=40)
TINY = Settings(ions=12, replicas=4, equilibrate=5, sweeps=20, bins=20)
SLAB = Slab(4.0, 0.5, -0.015)

slabs = st.builds(
    Slab,
    length_nm=st.floats(1.0, 8.0),
    salt_molar=st.sampled_from([0.0, 0.1, 0.5, 2.0]),
    charge_c_per_m2=st.sampled_from([0.0, -0.01, 0.02, -0.03]),
    positive=st.integers(1, 3),
    negative=st.integers(-3, -1),
)


def simulated(slab: Slab, settings: Settings = SMALL, seed: int = 0) -> Simulation:
    run = Simulation(slab, settings, seed)
    run.advance(settings.equilibrate + settings.sweeps)
    return run


@given(slab=slabs, ions=st.integers(60, 300))
def test_a_box_is_neutral_has_the_concentration_and_nearly_the_charge(
    slab: Slab, ions: int
) -> None:
    box = box_of(slab, ions)

    walls = 2 * box.charge_c_per_m2 * box.side_nm**2 / 0.1602177
    assert box.ion_charge + walls == pytest.approx(0, abs=1e-9)
    volume_nm3 = box.side_nm**2 * slab.length_nm
    counter_ions = box.negative if slab.charge_c_per_m2 > 0 else 0
    if not counter_ions:
        assert box.negative == pytest.approx(slab.salt_molar * PER_NM3_AND_MOLAR * volume_nm3)
    if not slab.charge_c_per_m2:
        assert box.charge_c_per_m2 == 0


def test_the_charge_of_the_walls_is_met_within_a_few_percent() -> None:
    asked = [Slab(4.0, salt, -0.01) for salt in (0.1, 0.5, 1.0, 2.0)]

    off = [abs(box_of(slab, 100).charge_c_per_m2 / -0.01 - 1) for slab in asked]

    assert max(off) < 0.04


def test_without_ions_a_profile_is_empty() -> None:
    profiles = simulated(Slab(3.0, 0.0, 0.0)).profiles()

    assert not profiles.density_molar.any()
    assert not profiles.error_molar.any()


def test_a_profile_holds_all_ions_and_none_in_the_walls() -> None:
    run = simulated(SLAB)

    profiles = run.profiles()

    per_bin_nm3 = run.box.side_nm**2 * SLAB.length_nm / SMALL.bins
    found = profiles.density_molar.sum(-1) * per_bin_nm3 * PER_NM3_AND_MOLAR
    assert found.tolist() == pytest.approx([run.box.positive, run.box.negative])
    touching = profiles.z_nm.abs() > SLAB.length_nm / 2 - 0.1
    assert not profiles.density_molar[:, touching].any()


def test_both_walls_are_alike_within_the_errors() -> None:
    profiles = simulated(SLAB, replace(SMALL, sweeps=50, bins=20)).profiles()

    inner = slice(2, 10)
    left, right = profiles.density_molar[:, inner], profiles.density_molar.flip(-1)[:, inner]
    error = torch.hypot(profiles.error_molar[:, inner], profiles.error_molar.flip(-1)[:, inner])
    off = ((left - right) / error).square().mean()
    assert 0.4 < off < 2.0, "squares of deviations are one squared error on average"


def test_more_charge_on_the_walls_brings_more_counter_ions_there() -> None:
    contacts = []
    for charge in (0.0, -0.02, -0.08):
        run = simulated(replace(SLAB, charge_c_per_m2=charge))
        contacts.append(contact_molar(run.profiles(), run.box))

    positive, negative = torch.stack(contacts).T.tolist()
    assert positive[0] < positive[1] < positive[2]
    assert negative[2] < negative[0]


def test_charged_sheets_have_the_potential_of_a_plane_less_that_of_a_square() -> None:
    heights = torch.tensor([0.1, 0.4, 1.5])
    grid = (torch.arange(400, dtype=torch.float64) + 0.5) / 400 - 0.5
    flat = (grid[:, None].square() + grid.square()).flatten()
    square = [(flat + h * h).rsqrt().mean().item() for h in heights.double()]

    expected = [-2 * math.pi * h - s for h, s in zip(heights.tolist(), square, strict=True)]

    assert far_images(heights).tolist() == pytest.approx(expected, rel=1e-4)


def counter_ions_molar(slab: Slab, z_nm: torch.Tensor) -> torch.Tensor:
    """Return the exact mean-field profile of point counter-ions.

    It solves the Poisson-Boltzmann equation between two walls without salt:
    n = K^2 / (2 pi l cos(K z)^2) with K tan(K D / 2) = 2 pi l s, for a Bjerrum length l, s charges
    per nm2 and a gap D.
    """
    coupling = 2 * math.pi * 0.714
    charges, gap_nm = -slab.charge_c_per_m2 / 0.1602177, slab.length_nm - slab.diameter_nm
    low, high = 0.0, math.pi / gap_nm
    for _ in range(60):
        middle = (low + high) / 2
        too_far = middle * math.tan(middle * gap_nm / 2) > coupling * charges
        low, high = (low, middle) if too_far else (middle, high)
    return low**2 / coupling / torch.cos(low * z_nm) ** 2 / PER_NM3_AND_MOLAR


def test_weakly_coupled_counter_ions_are_where_mean_field_theory_has_them() -> None:
    slab = Slab(4.0, 0.0, -0.02, diameter_nm=0.2)
    settings = Settings(ions=24, replicas=64, equilibrate=15, sweeps=85, bins=20)

    profiles = simulated(slab, settings).profiles()

    inner = slice(1, -1)
    theory = counter_ions_molar(slab, profiles.z_nm)[inner]
    assert theory.max() / theory.min() > 2.0, "a flat profile proves nothing"
    off = profiles.density_molar[0, inner] / theory - 1
    assert off.abs().mean() < 0.03


def test_the_same_seed_gives_the_same_and_another_one_something_else() -> None:
    one, again, other = (simulated(SLAB, TINY, seed).profiles() for seed in (0, 0, 1))

    assert torch.equal(one.density_molar, again.density_molar)
    assert not torch.equal(one.density_molar, other.density_molar)


@pytest.mark.parametrize("method", METHODS)
def test_a_simulation_goes_on_from_its_state_to_the_last_bit(method: str) -> None:
    settings = replace(TINY, method=method)
    whole, first, second = (Simulation(SLAB, settings, seed) for seed in (0, 0, 7))
    whole.advance(100)
    first.advance(17)

    second.load_state_dict(first.state_dict())
    first.advance(100)
    second.advance(100)

    assert second.done
    for run in (first, second):
        assert run.sweeps == whole.sweeps
        assert torch.equal(run.profiles().density_molar, whole.profiles().density_molar)


def test_a_state_of_another_simulation_is_refused_and_changes_nothing() -> None:
    run, other = Simulation(SLAB, TINY, 0), Simulation(replace(SLAB, salt_molar=1.0), TINY, 0)
    other.advance(1)

    with raises_message(ValueError):
        run.load_state_dict(other.state_dict())

    assert run.sweeps == 0


@pytest.mark.parametrize(
    "asked",
    [
        {"length_nm": 0.5},
        {"salt_molar": -1.0},
        {"positive": 0},
        {"negative": 1},
        {"diameter_nm": 0.0},
    ],
    ids=str,
)
def test_invalid_slabs_are_refused(asked: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"invalid .*: expected"):
        replace(SLAB, **asked)  # type: ignore[arg-type]


def test_densities_in_other_bins_hold_as_many_ions() -> None:
    z_nm, density = np.linspace(-1.95, 1.95, 40), np.arange(40.0)

    means = rebinned(z_nm, density, np.array([-2.0, -1.9, 0.03, 2.0]))

    widths_nm = torch.tensor([0.1, 1.93, 1.97])
    assert means[0] == pytest.approx(0.0)
    assert float((means * widths_nm).sum()) == pytest.approx(0.1 * density.sum())


@pytest.mark.data
def test_it_agrees_with_recorded_molecular_dynamics(data_root: Path) -> None:
    settings = Settings(ions=50, replicas=48, equilibrate=20, sweeps=50, bins=20)
    points, recorded, _ = read(data_root / "ionic-density", settings.bins)
    (n,) = torch.nonzero((points - torch.tensor([4.0, 0.5, -0.02])).abs().amax(-1) < 1e-6)[:, 0]

    profiles: Profiles = simulated(Slab(4.0, 0.5, -0.02), settings).profiles()

    ratio = (profiles.density_molar + profiles.density_molar.flip(-1)) / 2 / recorded[n]
    assert (ratio - 1)[:, 2:-2].square().mean().sqrt() < 0.04
    assert ratio[:, 1].tolist() == pytest.approx([1, 1], abs=0.08)
