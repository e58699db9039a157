"""The data and error measures of the surrogate, and the recorded simulations."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples.ions import profiles, recorded
from examples.ions.model import Slab
from examples.ions.network import Scale, fit, marks, predict, profile_errors, surrogate, targets
from examples.ions.profiles import by_polynomial, judge, random_split, read, salt_splits
from examples.ions.simulate import Settings, Simulation
from torch import Tensor

from tests.messages import raises_message

BINS = 40


def test_the_network_is_the_published_one_with_two_kinds_of_ions() -> None:
    net = surrogate(3, BINS)

    kinds = [type(layer).__name__ for layer in net]
    assert kinds == ["Linear", "ReLU", "Dropout", "Linear", "Sigmoid", "Dropout", "Linear"]
    sizes = [tuple(p.shape) for p in net.parameters() if p.dim() == 2]
    assert sizes == [(512, 3), (256, 512), (2 * BINS, 256)]
    assert {layer.p for layer in net if isinstance(layer, torch.nn.Dropout)} == {0.15}


def test_inputs_are_brought_to_zero_to_one() -> None:
    scale = Scale((4.0, 0.1), (5.0, 2.1))

    scaled = scale(torch.tensor([[4.0, 2.1], [4.5, 1.1]], dtype=torch.float64))

    torch.testing.assert_close(scaled, torch.tensor([[0.0, 1.0], [0.5, 0.5]]))


def test_targets_are_symmetric_and_in_their_unit() -> None:
    profile = torch.arange(8.0).reshape(1, 2, 4)

    (target,) = targets(profile, torch.tensor([2.0]))

    assert target.tolist() == [0.75] * 4 + [2.75] * 4


def test_marks_are_found_where_they_are() -> None:
    left = torch.tensor([0.0, 1.0, 5.0, 4.0, 3.0, 2.0])
    profile = torch.cat((left, left.flip(0)))[None, None].expand(1, 2, -1)
    contact = torch.tensor([2.0 / 12])  # between the second bin and the third

    found = marks(profile, contact)

    torch.testing.assert_close(found, torch.tensor([3.0, 5.0, 2.0]).expand(1, 2, 3))


def test_an_error_is_a_part_of_the_mean_density() -> None:
    simulated = torch.tensor([[[1.0, 3.0], [2.0, 2.0]]])

    errors = profile_errors(simulated + torch.tensor([1.0, -1.0]), simulated)

    torch.testing.assert_close(errors, torch.tensor([[0.5, 0.5]]))


def test_training_learns_and_a_prediction_leaves_the_network_as_it_was() -> None:
    torch.manual_seed(0)
    net, points = surrogate(3, BINS), torch.rand(12, 3)
    profiles = (points.sum(-1, keepdim=True) * torch.ones(2 * BINS)).contiguous()
    before = (predict(net, points).flatten(1) - profiles).square().mean()

    fit(points, profiles, net, steps=150, batch=5, seed=0)
    after = predict(net, points).flatten(1)

    assert (after - profiles).square().mean() < 0.2 * before
    assert net.training
    assert torch.equal(after, predict(net, points).flatten(1)), "dropout is off in a prediction"


def quadratic(points: np.ndarray, species: int, bins: int) -> np.ndarray:
    """Return symmetric profiles that are quadratic in the parameters."""
    length, salt, charge = points.T
    height = salt + 0.1 * length * salt + (-50 * charge) ** 2 * (species == 0)
    shape = 1 + np.cos(np.linspace(-1, 1, bins)) ** 2
    profiles: np.ndarray = height[:, None] * shape
    return profiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with simulations in the recorded format: 3 lengths, 3 concentrations, 3 charges."""
    grid = np.array(
        [
            (z, c, i)
            for z in (4.0, 4.5, 5.0)
            for c in (0.1, 1.0, 2.0)
            for i in (-0.02, -0.015, -0.01)
        ]
    )
    params = np.column_stack([grid[:, 0], grid[:, 1], np.full((27, 1), 0.415), grid[:, 2]])
    half = grid[:, 0, None, None] / 2
    z_nm = half * np.linspace(-1, 1, 2 * BINS)[None, None].repeat(2, axis=1)
    density = np.stack([quadratic(grid, species, 2 * BINS) for species in range(2)], axis=1)
    np.savez(
        tmp_path / profiles.FILE,
        params=params,
        param_names=np.array(list("Zcdi")),
        z=z_nm,
        density=density,
        error_raw=0.21 * density,
    )
    return tmp_path


def test_recorded_simulations_are_read_with_their_true_errors(folder: Path) -> None:
    recorded = read(folder)

    assert recorded.points.shape == (27, 3)
    assert recorded.density_molar.shape == (27, 2, BINS)
    torch.testing.assert_close(recorded.error_molar, 0.1 * recorded.density_molar)
    z_nm = (recorded.contact * 2 * BINS - 0.5) / (2 * BINS - 1) * recorded.points[:, 0]
    torch.testing.assert_close(z_nm, torch.full((27,), 0.415 / 2, dtype=torch.float64))


def test_a_recorded_profile_is_the_mean_of_both_walls_and_so_has_a_smaller_error(
    folder: Path,
) -> None:
    points, density, error = recorded.read(folder, 10)

    assert points.shape == (27, 3)
    assert density.shape == (27, 2, 10)
    torch.testing.assert_close(density, density.flip(-1))
    torch.testing.assert_close(error, 0.1 * density / 2**0.5)


def test_a_simulation_is_compared_in_the_errors_of_both() -> None:
    settings = Settings(ions=12, replicas=4, equilibrate=2, sweeps=4, bins=20)
    run = Simulation(Slab(4.0, 0.5, -0.02), settings, 0)
    run.advance(6)
    ours = run.profiles()
    mine = (ours.density_molar + ours.density_molar.flip(-1)) / 2 + 0.1  # in place of empty bins

    differences = recorded.compared(run, 2.0 * mine, 3.0 * mine)

    for found in differences:
        for place, (off, of) in found.items():
            assert of > 1.5, "the recorded error alone is 1.5 of the density"
            assert (0.5 < off < 0.8) if place == "profile" else (-0.8 < off < -0.5), place


def test_a_split_leaves_nothing_out_and_trains_nothing_held_out(folder: Path) -> None:
    recorded = read(folder)

    splits = {0.0: random_split(27, 0.2, seed=1), **salt_splits(recorded)}

    assert sorted(splits) == [0.0, 0.1, 1.0, 2.0]
    for train, test in splits.values():
        assert sorted([*train.tolist(), *test.tolist()]) == list(range(27))
    train, test = splits[1.0]
    assert set(recorded.points[test, 1].tolist()) == {1.0}
    assert set(recorded.points[train, 1].tolist()) == {0.1, 2.0}


def test_the_polynomial_predicts_quadratic_profiles_exactly(folder: Path) -> None:
    recorded = read(folder)
    train, test = random_split(27, 0.3, seed=0)

    errors = judge(recorded, test, by_polynomial(recorded, train, test))

    assert max(value for name, value in errors.items() if "noise" not in name) < 1e-4
    assert errors["mid_noise"] == pytest.approx(0.1 / 2**0.5)


def test_an_error_is_relative_and_in_standard_errors(folder: Path) -> None:
    recorded = read(folder)
    test = torch.arange(5)

    errors = judge(recorded, test, 1.1 * recorded.density_molar[test])

    for name in ("contact", "peak", "mid"):
        assert errors[name] == pytest.approx(0.1)
        assert errors[f"{name}_sigmas"] == pytest.approx(2**0.5)


@pytest.mark.parametrize("per_salt", [True, False])
def test_the_network_predicts_in_molar_whatever_it_is_trained_in(
    folder: Path, per_salt: bool
) -> None:
    recorded = read(folder)
    train, test = random_split(27, 0.2, seed=0)
    how = profiles.Training(steps=400, batch=8, per_salt=per_salt)

    predicted: Tensor = profiles.by_network(recorded, train, test, how)

    assert predicted.shape == (5, 2, BINS)
    assert profile_errors(predicted, recorded.density_molar[test]).median() < 0.4


def test_the_command_prints_all_splits_and_draws(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    drawn = folder / "profiles.png"
    command = ["profiles", "--data", str(folder), "--steps", "2", "--plot", str(drawn), "--json"]
    monkeypatch.setattr(sys, "argv", command)

    profiles.main()

    printed = json.loads(capsys.readouterr().out)
    named = {"random fifth", "0.1 M", "1 M", "2 M"}
    assert set(printed) == {"took_s", *named, *(f"{name}, polynomial" for name in named)}
    assert drawn.stat().st_size > 10_000


def test_the_command_trains_on_as_few_as_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = []

    def by_network(recorded: profiles.Recorded, train: torch.Tensor, *rest: Any) -> torch.Tensor:
        trained.append(len(train))
        return by_polynomial(recorded, train, rest[0])

    monkeypatch.setattr(profiles, "by_network", by_network)
    command = ["profiles", "--data", str(folder), "--random-only", "--train", "3", "--json"]
    monkeypatch.setattr(sys, "argv", command)

    profiles.main()

    assert trained == [3]
    assert "random fifth" in json.loads(capsys.readouterr().out)


def test_without_the_data_one_line_says_what_to_pass(tmp_path: Path) -> None:
    with raises_message(SystemExit, "--data", "DIR"):
        read(tmp_path)
