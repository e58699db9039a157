"""Models and backward passes that torch compiles: what is compiled of ours, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import get_compilation_metrics
from torch.nn.parallel import DistributedDataParallel

import evenstride
from evenstride.errors import ConfigError, UsageError
from evenstride.runtime.engines.fsdp import check_engine
from evenstride.trace.read import read_records
from tests.messages import raises_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.solo import numbered

OURS = str(Path(evenstride.__file__).parent)


@pytest.fixture(autouse=True)
def own_group() -> Iterator[None]:
    """Be the only rank of a group. Nothing compiled outlives a test."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()


def _with_buffers() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4)))


@pytest.mark.parametrize("watched", ["before", "after"])
def test_no_frame_of_ours_is_compiled(make_stride: MakeStride, watched: str) -> None:
    stride, engine = make_stride(), _with_buffers()
    loader = stride.loader(numbered(16))
    if watched == "before":
        stride.watch(engine)
    compiled: Any = torch.compile(engine, backend="eager")
    if watched == "after":
        stride.watch(compiled)
    before = len(get_compilation_metrics())

    for _, x in loader:
        stride.scale(compiled(x).square().mean()).backward()  # type: ignore[no-untyped-call]

    files = [str(one.co_filename) for one in get_compilation_metrics()[before:]]
    assert any(
        "linear.py" in file or "distributed.py" in file or "module" in file for file in files
    )
    assert not [file for file in files if file.startswith(OURS)]


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_trace_says_whether_a_model_is_compiled_for_each_batch_size(
    make_stride: MakeStride, tmp_path: Path, dynamic: bool | None
) -> None:
    stride = make_stride(trace=tmp_path)
    net: Any = torch.compile(nn.Linear(1, 1), backend="eager", dynamic=dynamic)
    loader = stride.loader(numbered(16))
    stride.watch(net)

    for _, x in loader:
        stride.scale(net(x).square().mean()).backward()  # type: ignore[no-untyped-call]
    stride.close()

    events = [record["event"] for record in read_records(tmp_path) if record["kind"] == "event"]
    assert events[-1].get("compiled", False) is (dynamic is None)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch itself
@pytest.mark.parametrize("engine", ["none", "DDP"])  # DDP itself would fail in the backward pass
def test_a_compiled_backward_pass_is_refused_by_name(make_stride: MakeStride, engine: str) -> None:
    stride, net = make_stride(), nn.Linear(1, 1)
    model = DistributedDataParallel(net) if engine == "DDP" else net
    loader = stride.loader(numbered(16))
    stride.watch(model)
    batches = iter(loader)
    loss = model(next(batches)[1]).square().mean()
    scaled = stride.scale(loss) if engine == "none" else loss

    def train() -> None:
        with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
            if engine == "DDP":
                stride.scale(loss)
            scaled.backward()

    with raises_message(UsageError):
        train()


def test_compiled_autograd_that_is_on_and_not_in_use_does_no_harm(make_stride: MakeStride) -> None:
    stride = make_stride()
    net: Any = torch.compile(nn.Linear(1, 1), backend="eager")
    loader = stride.loader(numbered(16))
    stride.watch(net)

    with torch._dynamo.config.patch(compiled_autograd=True):
        for _, x in loader:
            stride.scale(net(x).square().mean()).backward()  # type: ignore[no-untyped-call]

    assert stride.step == 4


def test_ddp_that_waits_inside_a_compiled_backward_pass_is_refused() -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        engine = _with_buffers()

    with raises_message(ConfigError, "python_reducer"):
        check_engine(engine, ["cpu"])
