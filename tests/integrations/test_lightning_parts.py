"""Parts of the strategies for Lightning that need no other process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed")

import lightning as L
import lightning.fabric.accelerators as fabric_accelerators
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric import Fabric
from lightning.pytorch import accelerators
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from evenstride.errors import ConfigError
from evenstride.integrations.lightning import EvenFabricStrategy, EvenStrategy
from evenstride.integrations.lightning_parts.step_loader import StepLogs
from evenstride.integrations.lightning_parts.trainer_checks import check_device
from evenstride.integrations.lightning_parts.user_loaders import EvenBatches, GivenLoader
from tests.messages import raises_message

shares = st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any)


@given(length=st.integers(6, 300), batch=st.integers(1, 40), of_ranks=shares)
def test_an_evaluation_has_each_sample_once_in_equally_many_batches(
    length: int, batch: int, of_ranks: list[int]
) -> None:
    count = len(of_ranks)
    parts = [list(EvenBatches(length, batch, r, count, lambda: of_ranks)) for r in range(count)]

    assert {len(mine) for mine in parts} == {len(EvenBatches(length, batch, 0, count, list))}
    assert all(samples for mine in parts for samples in mine)
    together = [index for step in zip(*parts, strict=True) for mine in step for index in mine]
    assert together == list(range(length))


def test_a_fast_rank_evaluates_more() -> None:
    sizes = [[len(one) for one in EvenBatches(20, 5, r, 2, lambda: (30, 10))] for r in (0, 1)]

    assert sizes == [[7, 7], [3, 3]]


JOINED: dict[str, Any] = {"sum": torch.sum, "max": torch.amax}


def logged(batches: Sequence[Sequence[tuple[float, int]]], op: str) -> float:
    """Return what rank 0 logs if each rank runs its batches: their values and samples."""
    sent: list[Tensor] = []

    def run(rank: int) -> Tensor:
        logs, *earlier = StepLogs(), *batches[rank][:-1]
        for number, (value, samples) in enumerate(earlier):
            logs.batch_begins(first=number == 0)
            assert float(logs.reduced(torch.tensor(value), op, samples, None)) == value
        logs.batch_begins(first=not earlier)
        value, samples = batches[rank][-1]
        return logs.reduced(torch.tensor(value), op, samples, over_ranks)

    def over_ranks(mine: Tensor, name: str) -> Tensor:
        sent.append(mine)
        joined: Tensor = JOINED[name](torch.stack(sent), dim=0)
        return joined

    for rank in range(1, len(batches)):
        run(rank)
    return float(run(0))


@pytest.mark.parametrize(
    ("op", "expected"), [("mean", (3 * 1 + 2 * 2 + 5 * 4) / 10), ("sum", 7.0), ("max", 4.0)]
)
def test_a_logged_value_covers_all_batches_of_a_step(op: str, expected: float) -> None:
    assert logged([[(1.0, 3), (2.0, 2)], [(4.0, 5)]], op) == pytest.approx(expected)


def test_a_placeholder_counts_for_nothing_in_a_logged_mean() -> None:
    assert logged([[(2.0, 3)], [(float("nan"), 0)]], "mean") == 2.0


class Rows(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


class OwnLoader(DataLoader[int]):
    def __iter__(self) -> Any:
        yield from ()


def test_what_a_users_loader_says_is_kept() -> None:
    def collate(samples: list[int]) -> list[int]:
        return samples

    loader = DataLoader(Rows(), 4, shuffle=True, collate_fn=collate, drop_last=True, timeout=0)
    ours = GivenLoader.of(loader, "training")

    assert (ours.batch_size, ours.shuffle, ours.drop_last) == (4, True, True)
    assert ours.options["collate_fn"] is collate
    assert not GivenLoader.of(DataLoader(Rows(), 4), "training").shuffle
    sampler: DistributedSampler[int] = DistributedSampler(
        Rows(), 2, 0, shuffle=True
    )  # as users write it for DDP
    assert GivenLoader.of(DataLoader(Rows(), 4, sampler=sampler), "training").shuffle


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Rows(), 4, sampler=RandomSampler(Rows(), replacement=True)),
        DataLoader(Rows(), 4, sampler=RandomSampler(Rows(), num_samples=5)),
        DataLoader(Rows(), batch_size=None),
        OwnLoader(Rows(), 4),
    ],
    ids=["replacement", "some", "without batches", "own iterator"],
)
def test_a_loader_that_draws_in_its_own_way_is_refused(loader: DataLoader[int]) -> None:
    with raises_message(ConfigError):
        GivenLoader.of(loader, "training")


@pytest.mark.parametrize("kind", [EvenStrategy, EvenFabricStrategy])
@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"global_batch": "auto"}, "auto"),
        ({"max_micro_batch": 2.5}, "2.5"),
        ({"engine": "none"}, "engine"),
        ({"sync": "local-sgd(every=2)"}, "local-sgd(every=2)"),
    ],
)
def test_an_invalid_setting_is_refused_when_the_strategy_is_made(
    kind: Any, options: dict[str, Any], fact: str
) -> None:
    with raises_message(ConfigError, fact):
        kind(**options)


@pytest.mark.parametrize("device", ["xla", "mps"])
def test_a_device_without_ddp_is_refused(device: str) -> None:
    with raises_message(ConfigError, device):
        check_device(torch.device(device))


@pytest.mark.filterwarnings("ignore:The `srun` command")  # of Lightning, where Slurm is installed
@pytest.mark.parametrize(
    ("make", "strategy", "accelerator"),
    [
        (L.Trainer, EvenStrategy, accelerators.XLAAccelerator),
        (Fabric, EvenFabricStrategy, fabric_accelerators.XLAAccelerator),
    ],
)
def test_lightning_itself_refuses_tpus(
    monkeypatch: pytest.MonkeyPatch, make: Any, strategy: Any, accelerator: Any
) -> None:
    monkeypatch.setattr(accelerator, "is_available", staticmethod(lambda: True))
    tpu = accelerator.__new__(accelerator)  # its constructor needs the library of TPUs
    with pytest.raises(ValueError, match=f"can only be used with.*{strategy.__name__}"):
        make(accelerator=tpu, strategy=strategy(), devices=1)


@pytest.mark.parametrize("kind", [EvenStrategy, EvenFabricStrategy])
def test_options_are_those_of_the_stride_and_of_ddp(kind: Any) -> None:
    kind(64, policy="uniform", weight_fn=len, compress="bf16", static_graph=True, timeout=None)

    with raises_message(ConfigError, "polizy", "policy"):
        kind(polizy="uniform")
