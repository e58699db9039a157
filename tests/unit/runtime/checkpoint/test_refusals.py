"""A checkpoint of another run is refused with the difference; safe differences can be allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from evenstride.errors import ConfigError
from evenstride.runtime.checkpoint.run_binding import describe
from tests.messages import raises_message
from tests.unit.runtime.checkpoint.kept import MemoryStorage, Runs, Solo


def _saved(runs: Runs, steps: int, **settings: Any) -> tuple[MemoryStorage, Solo]:
    storage = MemoryStorage()
    run = runs(storage, **settings)
    run.train(steps)
    run.checkpoint.save()
    return storage, run


def _refused(run: Solo, text: str, allow: Any = ()) -> None:
    """Check that restoring is refused and changes no state."""
    before = run.weights(), run.stride.state_dict(), run.optimizer.state_dict()
    random = torch.get_rng_state()

    with pytest.raises(ConfigError, match=text):
        run.restore(allow)

    assert (run.weights(), run.stride.state_dict()) == before[:2]
    assert str(run.optimizer.state_dict()) == str(before[2])
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"batch": 8}, r"with global_batch 4, but this run has 8; .*allow=\(\"global_batch\",\)"),
        ({"seed": 1}, r"with seed 0, but this run has 1; .*allow=\(\"seed\",\)"),
        ({"rows": 44}, r"with number of samples 40, but this run has 44; .*allow=\(\"data\",\)"),
        ({"shift": 0.5}, r"first, middle and last samples of digest .*allow=\(\"data\",\)"),
    ],
    ids=str,
)
def test_another_run_is_refused_with_the_difference_and_the_flag(
    runs: Runs, settings: dict[str, Any], text: str
) -> None:
    storage, _ = _saved(runs, 3)

    _refused(runs(storage, **settings), text)


@pytest.mark.parametrize(
    ("settings", "flag", "steps"),
    [
        ({"batch": 8}, "global_batch", 3),
        ({"rows": 44}, "data", 3),
        ({"shift": 0.5}, "data", 3),
        ({"seed": 1}, "seed", 10),
        ({"seed": 1, "batch": 8, "rows": 44}, ("seed", "global_batch", "data"), 10),
    ],
    ids=str,
)
def test_allowed_differences_are_restored(
    runs: Runs, settings: dict[str, Any], flag: Any, steps: int
) -> None:
    storage, first = _saved(runs, steps)
    run = runs(storage, **settings)

    restored = run.restore(flag)

    assert restored is not None
    assert run.weights() == first.weights()
    assert run.stride.step == steps
    assert run.stride.epoch == steps // 10
    state = run.stride.state_dict()
    assert (state["seed"], state["global_batch"]) == (
        settings.get("seed", 0),
        settings.get("batch", 4),
    )
    run.train(20)


def test_another_batch_continues_at_the_same_sample(runs: Runs) -> None:
    storage, _ = _saved(runs, 3)
    run = runs(storage, batch=8)
    run.restore("global_batch")

    run.train(3)

    assert run.stride.state_dict()["position"] == 3 * 4 + 3 * 8


def test_another_seed_in_mid_epoch_is_always_refused(runs: Runs) -> None:
    storage, _ = _saved(runs, 3)

    _refused(runs(storage, seed=1), "some would be trained twice", allow=("seed",))


def test_an_unknown_flag_is_refused(runs: Runs) -> None:
    storage, _ = _saved(runs, 3)

    _refused(runs(storage), "expected one or more of data, global_batch, seed", "model")


class Wider(nn.Module):
    """Another model: one shape differs, one key is new, one is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.more = nn.Parameter(torch.zeros(5, 1)), nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an output that depends on all parameters."""
        return x @ self.weight.T + self.more.sum()


def test_another_model_is_refused_with_its_first_differences(runs: Runs) -> None:
    storage, _ = _saved(runs, 3)

    _refused(
        runs(storage, net=Wider()),
        r"model/more is not in the checkpoint; model/bias is only in the checkpoint; model/weight "
        r"has shape \(5, 1\) here and \(3, 1\) in the checkpoint",
    )


def test_the_first_of_many_differences_are_named(runs: Runs) -> None:
    storage, _ = _saved(runs, 3)

    _refused(runs(storage, net=nn.Sequential(*[nn.Linear(1, 1) for _ in range(9)])), "and 15 more")


def test_another_optimizer_is_refused(runs: Runs) -> None:
    storage, _ = _saved(runs, 3, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))

    _refused(
        runs(storage, optimizer=lambda p: torch.optim.Adam(p)),
        r"optimizer/state/\w+/momentum_buffer .* is only in the checkpoint",
    )


def test_other_parameter_groups_are_refused(runs: Runs) -> None:
    storage, _ = _saved(runs, 3)

    def grouped(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": [each]} for each in parameters])

    _refused(runs(storage, optimizer=grouped), r"parameter groups of \[1, 1\] parameters here")


def test_an_object_that_was_not_saved_is_refused(runs: Runs) -> None:
    storage, _ = _saved(runs, 3, extra={"a": nn.Linear(1, 1)})

    _refused(
        runs(storage, extra={"b": nn.Linear(1, 1)}),
        "extra/b is not in the checkpoint, which has extra/a; leave it out",
    )


def test_a_restore_inside_the_loop_is_refused(runs: Runs) -> None:
    storage, _ = _saved(runs, 3)
    run = runs(storage)

    for _ in run.loader:
        with raises_message(Exception):
            run.restore()
        break


class Noisy(Dataset[Any]):
    """Augments with its own, unseeded generator."""

    def __init__(self) -> None:
        self._generator = torch.Generator()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1, generator=self._generator) + index


class Seeded(Dataset[Any]):
    """Augments with the global generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.rand(2) + index, "y": [index, "label"]}


class Odd(Dataset[Any]):
    """Has samples of an unknown type, or that cannot be loaded."""

    def __init__(self, sample: Any) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        if isinstance(self._sample, Exception):
            raise self._sample
        return self._sample


def test_random_augmentation_is_no_difference() -> None:
    assert describe(Seeded(), 0) == describe(Seeded(), 0)
    assert "samples" in describe(Seeded(), 0)
    assert "samples" not in describe(Noisy(), 0)


@pytest.mark.parametrize(
    "sample", [object(), OSError("not on this machine")], ids=["an object", "an error"]
)
def test_a_sample_of_an_unknown_type_has_no_digest(sample: Any) -> None:
    description = describe(Odd(sample), 0)

    assert description == {"kind": f"{__name__}.Odd", "length": 3}


def test_describing_the_data_draws_no_random_number() -> None:
    before = torch.get_rng_state()

    describe(Seeded(), 0)

    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_bytes_of_another_type_have_another_digest() -> None:
    a = TensorDataset(torch.zeros(4, 2))
    b = TensorDataset(torch.zeros(4, 1, dtype=torch.float64))

    assert describe(a, 0) != describe(b, 0)
