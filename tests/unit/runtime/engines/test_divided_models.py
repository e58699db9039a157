"""Models whose work on one sample is divided are refused by name, on a group that is played."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import evenstride
from evenstride.errors import ConfigError
from evenstride.runtime.engines.divided_models import (
    check_other_dims,
    check_stages,
    in_context_parallel,
)
from evenstride.runtime.engines.fsdp import check_engine
from evenstride.runtime.engines.model_agreement import meet, not_averaged
from evenstride.runtime.engines.watched_models import engine_exists
from tests.messages import raises_message
from tests.unit.runtime.solo import numbered

RANKS, OWN = 4, 2


@pytest.fixture(autouse=True)
def played_group() -> Iterator[None]:
    """Be the third of four ranks, whose collectives do nothing. No mesh outlives a test."""
    gc.collect()
    dist.init_process_group("fake", rank=OWN, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


class Mixture(nn.Module):
    """A dense layer and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.experts = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Run both layers."""
        y: Tensor = self.experts(self.dense(x))
        return y


def _mesh(*names: str, shape: tuple[int, ...] = (2, 2)) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names or None)


def _pair() -> dist.ProcessGroup:
    pair: dist.ProcessGroup | None = dist.new_group([2, 3])
    assert pair is not None
    return pair


def _marked(name: str, value: bool) -> nn.Module:
    model = Mixture()
    for parameter in model.experts.parameters():
        setattr(parameter, name, value)
    return DistributedDataParallel(model)


def _holding(name: str, group: dist.ProcessGroup) -> nn.Module:
    model = Mixture()
    setattr(model.dense, name, group)
    return DistributedDataParallel(model)


def _tensor_parallel() -> nn.Module:
    return parallelize_module(Mixture(), _mesh("dp", "tp")["tp"], {"dense": ColwiseParallel()})


def _experts_on_other_ranks() -> Any:
    model = Mixture()
    fully_shard(model.experts, mesh=DeviceMesh.from_group(_pair(), "cpu"))
    model.experts.set_gradient_divide_factor(RANKS)  # type: ignore[operator]
    return fully_shard(model)


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (_tensor_parallel, ("tensor parallelism", "dense.weight is a DTensor", "(tp=2)")),
        (lambda: _marked("allreduce", False), ("expert parallelism", "experts.weight")),
        (lambda: _marked("skip_allreduce", True), ("expert parallelism", "skip_allreduce=True")),
        (_experts_on_other_ranks, ("expert parallelism", "2 ranks", "4")),
        (lambda: _holding("tp_group", _pair()), ("tensor parallelism", "Linear", "tp_group")),
        (lambda: _holding("_cp_group", _pair()), ("context parallelism", "_cp_group (2 ranks)")),
        (
            lambda: _holding("expert_model_parallel_group", _pair()),
            ("expert parallelism", "expert_model_parallel_group"),
        ),
    ],
)
def test_a_divided_model_is_refused_by_the_name_of_what_divides_it(
    make: Callable[[], nn.Module], facts: tuple[str, ...]
) -> None:
    model = make()

    with raises_message(ConfigError, *facts, "use DistributedDataParallel, fully_shard or HSDP"):
        check_engine(model, ["cpu"] * RANKS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _marked("allreduce", True),
        lambda: _marked("skip_allreduce", False),
        lambda: _holding("tp_group", dist.new_group([OWN])),
        lambda: _holding("norm_group", _pair()),
        lambda: _holding("tp_group", None),  # type: ignore[arg-type]
    ],
)
def test_what_looks_alike_and_divides_nothing_is_accepted(make: Callable[[], nn.Module]) -> None:
    check_engine(make(), ["cpu"] * RANKS)


def test_attention_that_torch_has_made_context_parallel_is_refused() -> None:
    pytest.importorskip("torch.distributed.tensor.experimental._context_parallel")
    from torch.distributed.tensor.experimental._context_parallel import _attention

    style = _attention._ContextParallel(2, _attention._ContextParallel.AttentionType.SDPA)
    model = parallelize_module(Mixture(), _mesh("cp", shape=(4,)), {"dense": style})

    with raises_message(ConfigError, "context parallelism", "Linear"):
        check_engine(DistributedDataParallel(model), ["cpu"] * RANKS)


def test_a_loss_scaled_inside_context_parallel_is_seen() -> None:
    x = torch.ones(2, 16, 4)

    assert not in_context_parallel()
    with context_parallel(_mesh("cp", shape=(4,)), buffers=[x], buffer_seq_dims=[1]):
        assert in_context_parallel()
    assert not in_context_parallel()


def _stage(module: nn.Module) -> PipelineStage:
    return PipelineStage(module, 0, 2, torch.device("cpu"), group=_pair())


def test_a_pipeline_is_refused_whatever_part_of_it_is_watched() -> None:
    model = DistributedDataParallel(Mixture(), process_group=_pair())
    check_stages([model])
    stage = _stage(model.module)
    schedule = ScheduleGPipe(stage, 2)

    for watched in (stage, schedule, model):
        with raises_message(
            ConfigError, "pipeline parallelism", "PipelineStage" * (watched is model)
        ):
            asked = {"drift_check": None, "compress": None, "check_loss": True}
            meet(watched, asked, None, lambda show, judge: judge([show()]))  # type: ignore[arg-type]
    check_stages([Mixture()])  # of another model


def test_a_stage_that_is_made_after_watch_is_refused_before_the_first_batch() -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    stride, model = evenstride.Stride(global_batch=4), DistributedDataParallel(nn.Linear(1, 1))
    loader = stride.loader(numbered(16))
    stride.watch(model)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))

    with raises_message(ConfigError, "pipeline parallelism"):
        next(iter(loader))

    assert stride.step == 0
    assert stage.submod is model
    stride.close()


@pytest.mark.parametrize(
    ("names", "ranks", "facts"),
    [
        (("dp", "cp"), [0, 2], ("context parallelism", "(dp=2, cp=2)", "cp=2")),
        (("pp", "dp"), [2, 3], ("pipeline parallelism", "pp=2")),
        (("dp", "model"), [2, 0], ("tensor, context, expert or pipeline", "model=2")),
        ((), [2, 3], ("tensor, context, expert or pipeline", "dimension 0=2")),
    ],
)
def test_a_stride_over_one_of_several_dimensions_is_refused(
    names: tuple[str, ...], ranks: list[int], facts: tuple[str, ...]
) -> None:
    mesh = _mesh(*names)

    with raises_message(ConfigError, *facts, 'policy="uniform"'):
        check_other_dims(ranks)

    assert mesh.ndim == 2


@pytest.mark.parametrize("shape", [(4,), (4, 1), (2, 2)])
def test_a_stride_over_no_dimension_of_a_mesh_is_accepted(shape: tuple[int, ...]) -> None:
    mesh = _mesh(shape=shape)
    other = [1, 2] if shape == (2, 2) else [0, 1, 2, 3]

    check_other_dims(other)

    assert mesh.size() == RANKS


@pytest.mark.parametrize("names", [("dp_replicate", "dp_shard"), ("data_parallel", "shard")])
def test_a_stride_over_one_of_several_dimensions_of_data_is_accepted(
    names: tuple[str, ...],
) -> None:
    mesh = _mesh(*names)
    model = Mixture()
    fully_shard(model, mesh=mesh[names[1]])

    check_other_dims([2, 3])
    check_engine(model, ["cpu", "cpu"])

    assert mesh.ndim == 2


def test_classes_that_cannot_be_hashed_or_have_no_module_are_passed_over() -> None:
    class Kind(type):
        """A metaclass that defines equality only."""

        def __eq__(cls, other: object) -> bool:
            return cls is other

        def __getattribute__(cls, name: str) -> Any:
            if name == "__module__":
                raise AttributeError(name)
            return super().__getattribute__(name)

    class Odd(metaclass=Kind):
        def __init__(self) -> None:
            self.held = list[int]()  # so that the garbage collector lists it

    odd = Odd()
    assert any(one is odd for one in gc.get_objects())

    check_stages([Mixture()])
    engine_exists()


def _ignoring() -> nn.Module:
    model: Any = Mixture()
    names = ["experts.weight", "experts.bias"]
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, names)
    return DistributedDataParallel(model)


def _in_part() -> nn.Module:
    model = Mixture()
    model.dense = DistributedDataParallel(model.dense)  # type: ignore[assignment]
    return model


def _sharded(gathered: bool, **options: Any) -> Any:
    model = Mixture()
    fully_shard(model.dense)
    whole = fully_shard(model, **options)
    if gathered:
        whole.unshard()
    return whole


def _sharded_without_experts() -> Any:
    model = Mixture()
    return fully_shard(model, ignored_params=set(model.experts.parameters()))


def _late() -> nn.Module:
    model, last = Mixture(), "experts.weight"
    return DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[(last, model.experts.weight)],
        param_to_hook_all_reduce=model.dense.weight,
    )


class Averaging(nn.Module):
    """An engine of the script's own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def no_sync(self) -> None:
        """Do nothing."""


class Around(nn.Module):
    """A wrapper that keeps its engine where torch does not see it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.engines = module, [DistributedDataParallel(module)]


def _frozen() -> nn.Module:
    model = _in_part()
    model.experts.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (_ignoring, "module.experts.weight"),
        (_in_part, "experts.weight"),
        (_sharded_without_experts, "experts.weight"),
        (_frozen, ""),
        (_late, ""),
        (lambda: _sharded(False), ""),
        (lambda: _sharded(True), ""),
        (lambda: _sharded(True, reshard_after_forward=False), ""),
        (lambda: DistributedDataParallel(Mixture()), ""),
        (lambda: nn.ModuleList(DistributedDataParallel(Mixture()) for _ in range(2)), ""),
        (lambda: Averaging(Mixture()), ""),
        (lambda: Around(Mixture()), ""),
        (lambda: torch.compile(DistributedDataParallel(Mixture()), backend="eager"), ""),
    ],
)
def test_a_parameter_that_no_engine_averages_is_found(
    make: Callable[[], nn.Module], name: str
) -> None:
    assert not_averaged(make()) == name
