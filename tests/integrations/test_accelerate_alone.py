"""`EvenAccelerator` in one process: loaders, schedules, saved states, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    TorchTensorParallelPlugin,
)
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import evenstride
from evenstride.errors import ConfigError, UsageError
from evenstride.integrations import versions
from evenstride.integrations.accelerate import EvenAccelerator
from tests.inside import session
from tests.integrations.accelerate_programs import forget
from tests.messages import check_message, raises_message

Make = Callable[..., Any]
DATA = TensorDataset(torch.arange(22.0).reshape(22, 1))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make an accelerator, which is released when the test ends."""
    made: list[EvenAccelerator] = []
    # Accelerate sets them for its own processes.
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)

    def one(*args: Any, **options: Any) -> EvenAccelerator:
        made.append(EvenAccelerator(*args, cpu=True, **options))
        return made[-1]

    yield one
    for accelerator in made:
        accelerator.free_memory()
    forget()


def trainable() -> tuple[nn.Linear, torch.optim.Optimizer]:
    """Return a model with its optimizer."""
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def shuffled(**options: Any) -> DataLoader[Any]:
    """Return a training loader."""
    return DataLoader(DATA, **{"batch_size": 4, "shuffle": True, **options})


def train(accelerator: Any, model: nn.Module, optimizer: Any, loader: Any, *more: Any) -> list[int]:
    """Train one pass; return the sizes of its batches."""
    sizes = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x / 22).square().mean())
            optimizer.step()
            for scheduler in more:
                scheduler.step()
            optimizer.zero_grad()
        sizes.append(len(x))
    return sizes


def test_batches_are_counted_as_in_accelerate(make: Make) -> None:
    accelerator = make(gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(*trainable(), shuffled())

    assert train(accelerator, model, optimizer, loader) == [4, 4, 4, 4, 3, 3]
    assert len(loader) == 6
    assert (accelerator.stride.global_batch, accelerator.stride.step) == (16, 2)
    assert loader.dataset is DATA
    assert (loader.batch_size, loader.num_workers, loader.total_batch_size) == (4, 0, 4)
    assert isinstance(loader, DataLoader)


def test_drop_last_leaves_out_the_incomplete_global_batch(make: Make) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*trainable(), shuffled(drop_last=True))

    assert train(accelerator, model, optimizer, loader) == [4] * len(loader) == [4] * 4


def test_options_of_the_loader_are_kept(make: Make) -> None:
    begun: list[int] = []

    def stacked(samples: list[Any]) -> Any:
        return [torch.stack([x for (x,) in samples])]

    given = shuffled(collate_fn=stacked, worker_init_fn=begun.append, timeout=3)
    accelerator = make()
    _, _, loader = accelerator.prepare(*trainable(), given)

    inner = session(accelerator.stride).loaders.latest
    assert inner is not None
    assert (inner.collate_fn, inner.worker_init_fn, inner.timeout) == (stacked, begun.append, 3)
    assert loader.collate_fn is stacked


def test_the_order_of_the_data_set_may_be_kept(make: Make) -> None:
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*trainable(), shuffled(shuffle=False))

    seen = []
    for (x,) in loader:
        seen += x.flatten().tolist()
        accelerator.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert seen == list(range(22))


def test_the_loader_that_shuffles_is_for_training(make: Make) -> None:
    accelerator = make()
    evaluation, model, training = accelerator.prepare(
        shuffled(shuffle=False), trainable()[0], shuffled()
    )
    later = accelerator.prepare(shuffled(shuffle=False))

    del model
    assert sum(len(accelerator.gather_for_metrics(x)) for (x,) in later) == 22
    kinds = [type(one).__name__ for one in (evaluation, training, later)]
    assert kinds == ["EvalBatches", "TrainBatches", "EvalBatches"]


def test_a_loader_alone_is_for_evaluation_unless_it_shuffles(make: Make) -> None:
    accelerator = make()
    early = accelerator.prepare(shuffled(shuffle=False))
    training = accelerator.prepare(shuffled())

    assert type(early).__name__ == "DataLoaderShard", "Accelerate's own, without a Stride yet"
    assert type(training).__name__ == "TrainBatches"
    assert sum(len(accelerator.gather_for_metrics(x)) for (x,) in early) == 22


def test_a_script_may_say_what_a_loader_is_for(make: Make) -> None:
    accelerator = make()
    training = accelerator.prepare_data_loader(shuffled(shuffle=False), train=True)
    evaluation = accelerator.prepare_data_loader(shuffled(), train=False)

    assert type(training).__name__ == "TrainBatches"
    assert type(evaluation).__name__ == "DataLoaderShard", "shuffled by Accelerate"


def test_two_shuffling_loaders_are_refused(make: Make) -> None:
    with raises_message(ConfigError, "train=False"):
        make().prepare(*trainable(), shuffled(), shuffled())
    accelerator = make()
    accelerator.prepare(shuffled())
    with raises_message(ConfigError, "train=False"):
        accelerator.prepare(shuffled())
    with raises_message(ConfigError, "free_memory"):
        accelerator.prepare_data_loader(shuffled(), train=True)


class Endless(IterableDataset[Any]):
    """Numbers without end."""

    def __iter__(self) -> Iterator[Any]:
        return iter([])


ORDERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "an IterableDataset": lambda: DataLoader(Endless(), batch_size=4),
    "weights": lambda: shuffled(shuffle=None, sampler=WeightedRandomSampler([1.0] * 22, 22)),
    "with replacement": lambda: shuffled(
        shuffle=None, sampler=RandomSampler(DATA, replacement=True)
    ),
    "a part": lambda: shuffled(shuffle=None, sampler=RandomSampler(DATA, num_samples=8)),
    "no batches": lambda: DataLoader(DATA, batch_size=None, shuffle=True),
    "batches of its own": lambda: DataLoader(
        DATA, batch_sampler=Pairs(SequentialSampler(DATA), 2, drop_last=False)
    ),
    "out of order": lambda: shuffled(in_order=False, num_workers=1),
}


class Pairs(BatchSampler):
    """Batches by a rule of its own."""


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_that_cannot_be_carried_over_is_refused(make: Make, name: str) -> None:
    with raises_message(ConfigError):
        make().prepare(*trainable(), ORDERS[name]())


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "deepspeed_plugin": lambda: {"deepspeed_plugin": object()},
    "megatron_lm_plugin": lambda: {"megatron_lm_plugin": object()},
    "dispatch_batches": lambda: {
        "dataloader_config": DataLoaderConfiguration(dispatch_batches=True)
    },
    "sync_each_batch": lambda: {
        "gradient_accumulation_plugin": GradientAccumulationPlugin(
            num_steps=2, sync_each_batch=True
        )
    },
    "sync_with_dataloader": lambda: {
        "gradient_accumulation_plugin": GradientAccumulationPlugin(
            num_steps=2, sync_with_dataloader=False
        )
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_needs_equal_batches_is_refused(make: Make, name: str) -> None:
    with raises_message(ConfigError):
        make(**SETTINGS[name]())


@pytest.mark.parametrize(
    ("variable", "name"),
    [("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"), ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM")],
)
def test_plugins_from_the_launcher_are_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, variable: str, name: str
) -> None:
    monkeypatch.setenv(variable, "true")
    with raises_message(ConfigError, name):
        make()


@pytest.mark.parametrize("name", ["tp_size", "cp_size", "sp_size"])
def test_processes_that_need_the_same_samples_are_refused(make: Make, name: str) -> None:
    if name == "tp_size":
        pytest.importorskip("transformers")  # Accelerate reads its version
    with raises_message(ConfigError, "tensor, context or sequence"):
        make(parallelism_config=ParallelismConfig(**{name: 2}))


def test_parallelism_from_elsewhere_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")  # Accelerate reads its version
    with raises_message(ConfigError, "tensor, context or sequence"):
        make(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    with monkeypatch.context() as launcher:
        launcher.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        launcher.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
        with raises_message(ConfigError, "tensor, context or sequence"):
            make()
    monkeypatch.setattr(EvenAccelerator, "parallelism_config", Divided())
    with raises_message(ConfigError, "tensor, context or sequence"):
        make()


class Divided:
    """A configuration of two processes that compute each sample together."""

    tp_size = 2

    def get_device_mesh(self, _: str) -> None: ...

    def _validate_accelerator(self, _: Any) -> None: ...


def test_tpus_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    create = AcceleratorState.__init__

    def on_tpus(state: Any, *args: Any, **options: Any) -> None:
        create(state, *args, **options)
        state.distributed_type = DistributedType.XLA

    monkeypatch.setattr(AcceleratorState, "__init__", on_tpus)
    with raises_message(ConfigError, "TPUs"):
        make()


def test_wrong_uses_are_refused(make: Make) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    with raises_message(UsageError, "prepare"):
        _ = accelerator.stride
    model, _, loader, evaluation = accelerator.prepare(
        *trainable(), shuffled(), shuffled(shuffle=False)
    )
    with raises_message(ConfigError, "before prepare()"):
        accelerator.gradient_accumulation_steps = 4
    with raises_message(ConfigError, "6"):
        accelerator.skip_first_batches(loader, 6)
    with raises_message(ConfigError, "Subset"):
        accelerator.skip_first_batches(evaluation, 1)
    with raises_message(UsageError, "EvenAccelerator"):
        next(iter(skip_first_batches(loader, 1)))
    with raises_message(UsageError, "accelerator.accumulate"):
        for (x,) in loader:
            accelerator.backward(model(x).mean())


def test_loaders_of_a_stride_are_refused_by_accelerate_itself(make: Make) -> None:
    del make  # for the states of Accelerate
    stride = evenstride.Stride(global_batch=4)
    training, evaluation = stride.loader(DATA), stride.loader(DATA, train=False)
    for loader in Accelerator(cpu=True).prepare(training, evaluation):
        with raises_message(UsageError, "EvenAccelerator"):
            next(iter(loader))
    stride.close()


def test_batches_are_skipped_without_a_saved_state(make: Make) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*trainable(), shuffled(shuffle=False))

    (first,) = next(iter(accelerator.skip_first_batches(loader, 2)))
    assert first.flatten().tolist() == [8, 9, 10, 11]
    assert len(train(accelerator, model, optimizer, loader)) == 4
    assert len(train(accelerator, model, optimizer, loader)) == 6, "the next epoch is whole"


def test_after_a_saved_state_nothing_more_is_skipped(make: Make, tmp_path: Path) -> None:
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*trainable(), shuffled(shuffle=False))
    for number, (x,) in enumerate(loader, 1):
        accelerator.backward(model(x / 22).mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))

    (first,) = next(iter(accelerator.skip_first_batches(loader, 1)))

    assert first.flatten().tolist() == [8, 9, 10, 11]


def test_a_schedule_ends_at_the_same_sample_for_any_global_batch(make: Make) -> None:
    accelerator = make(global_batch=6, gradient_accumulation_steps=1)
    model, optimizer = trainable()
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    prepared = accelerator.prepare(model, optimizer, shuffled(), scheduler)

    train(accelerator, *prepared)

    assert accelerator.scheduler_steps_per_update == Fraction(3, 2)
    assert prepared[3].scheduler.last_epoch == 4 * 3 // 2
    state = prepared[3].state_dict()
    assert state["evenstride_owed"] == "0"
    train(accelerator, *prepared)
    prepared[3].load_state_dict(state)
    assert prepared[3].scheduler.last_epoch == 6


def test_a_schedule_of_one_cycle_ends_with_it(make: Make) -> None:
    accelerator = make(global_batch=8)
    model, optimizer = trainable()
    scheduler = OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
    prepared = accelerator.prepare(model, optimizer, shuffled(), scheduler)

    train(accelerator, *prepared)

    assert prepared[3].scheduler.last_epoch == 5


def test_a_schedule_may_be_stepped_by_the_script(make: Make) -> None:
    accelerator = make(step_scheduler_with_optimizer=False)
    model, optimizer = trainable()
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    _, optimizer, _, scheduler = accelerator.prepare(model, optimizer, shuffled(), scheduler)

    optimizer.step()
    scheduler.step()

    assert scheduler.scheduler.last_epoch == 1


def test_a_state_of_accelerate_is_loaded_from_the_start(make: Make, tmp_path: Path) -> None:
    plain = Accelerator(cpu=True)
    model, optimizer = trainable()
    plain.prepare(model, optimizer, LambdaLR(optimizer, lambda _: 1.0))
    plain.save_state(str(tmp_path))
    accelerator = make()
    other, optimizer = trainable()
    accelerator.prepare(other, optimizer, LambdaLR(optimizer, lambda _: 1.0), shuffled())

    accelerator.load_state(str(tmp_path))

    assert other.weight.item() == model.weight.item()
    assert (accelerator.stride.epoch, accelerator.stride.step) == (0, 0)


def test_another_training_may_follow(make: Make) -> None:
    accelerator = make()
    for batch in (4, 2):
        model, optimizer, loader = accelerator.prepare(*trainable(), shuffled(batch_size=batch))
        assert train(accelerator, model, optimizer, loader)[0] == batch
        accelerator.free_memory()


def test_arguments_by_position_are_accelerates(make: Make) -> None:
    accelerator = EvenAccelerator(True, False, "no", 3, cpu=True, seed=5)

    assert accelerator.gradient_accumulation_steps == 3
    with pytest.raises(TypeError):
        EvenAccelerator(cpu=True, globalbatch=3)
    del make


def test_an_untested_version_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "version", lambda _: "1.99.3")
    with caplog.at_level(logging.WARNING, "evenstride"):
        for _ in range(2):
            versions.warn_if_untested("some-package", "1.15", "1.15")

    assert len(caplog.messages) == 1
    check_message(caplog.messages[0], "1.99.3", "1.15")
