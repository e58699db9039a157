"""Mixed-precision and sharded-optimizer runs, and what one process does with the same samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import evenstride
from evenstride.errors import StepInFlight
from tests.multiproc import sharded
from tests.multiproc.sharded import Layout, Net
from tests.multiproc.training import rows
from tests.order import epoch_order

RATE = 0.05
# Large enough to overflow a half-precision gradient, small enough for a finite loss.
FAR = 1e12
SCALE = 1024.0


@dataclass(frozen=True)
class Run:
    """What one run does; plain data, so that it can be sent to a rank.

    Args:
        batch: global batch.
        policy: with fixed shares, one for each island where there are several.
        engine: ``ddp``, ``fsdp`` (FSDP2), or ``plain`` for one process.
        mesh: ranks of each dimension under FSDP2.
        dtype: of the forward pass: ``float16``, ``bfloat16``, or ``float64`` for no autocast.
        steps: steps to train.
        micro: most samples per micro-batch.
        clip: largest gradient norm; gradients are then unscaled before.
        overflow: rank and step whose gradient overflows.
        spot: whether that is seen in one weight of that rank's own shard alone (FSDP2), which all
            islands hold alike.
        poison: a rank whose every loss is infinite.
        optimizer: ``sgd``, ``fused`` (Adam), ``zero`` or ``zero-view`` (Adam, sharded).
        agreed: whether FSDP2's ranks agree on an overflow, as they do unless it is broken.
        broken: whether the weighting is broken on purpose.
    """

    policy: str = "static:3,13"
    batch: int = 16
    engine: str = "ddp"
    mesh: tuple[int, ...] = (2,)
    dtype: str = "float16"
    steps: int = 4
    micro: int | None = None
    clip: float | None = None
    overflow: tuple[int, int] | None = None
    spot: bool = False
    poison: int | None = None
    optimizer: str = "sgd"
    agreed: bool = True
    broken: bool = False

    @property
    def precise(self) -> bool:
        """Whether all is float64."""
        return self.dtype == "float64"

    @property
    def data_dtype(self) -> torch.dtype:
        """Of weights and samples."""
        return torch.float64 if self.precise else torch.float32

    def spotted(self, rank: int, step: int) -> bool:
        """Return whether a weight of this rank's shard is to overflow at a step."""
        if not self.spot or self.overflow is None:
            return False
        islands = self.mesh[-1]
        return self.overflow[0] % islands == rank % islands and self.overflow[1] == step


@dataclass(frozen=True)
class Step:
    """What a rank saw of one step; plain data.

    Args:
        gradient: reduced and unscaled, not clipped yet.
        weights: after it.
        scale: of the losses, after it.
        position: in the data, after it.
        early: whether the position could be read before the optimizer's step.
    """

    gradient: list[float]
    weights: list[float]
    scale: float
    position: int
    early: bool


def train(rank: int, run: Run) -> list[Step]:
    """Return every step as this rank sees it."""
    with pytest.MonkeyPatch.context() as patch:
        if run.broken:
            patch.setattr("evenstride.runtime.loss.training_step.loss_factor", lambda *_: 1.0)
        stride = evenstride.Stride(
            global_batch=run.batch, policy=run.policy, shard_group=_island(run)
        )
        try:
            with _each_for_itself(not run.agreed):
                return list(_steps(rank, stride, run))
        finally:
            stride.close()


def _steps(rank: int, stride: evenstride.Stride, run: Run) -> Iterator[Step]:
    loader = stride.loader(rows(run.batch * run.steps, run.data_dtype), max_micro_batch=run.micro)
    model = stride.watch(_engine(run))
    optimizer = _optimizer(model, run)
    scaler = _scaler(run)
    for _, x, y in loader:
        # Read before the pass: it commits the step.
        overflows = run.overflow == (rank, stride.step)
        spotted = run.spotted(rank, stride.step)
        with _accumulating(stride, model, run):
            loss = _loss(model, x, y, run) * (FAR if overflows and not run.spot else 1.0)
            if rank == run.poison:
                loss = loss / torch.zeros(())
            scaler.scale(stride.scale(loss)).backward()
        if not stride.synced:
            continue
        if spotted:
            next(model.parameters()).grad.to_local().view(-1)[0] = torch.inf
        scaler.unscale_(optimizer)
        gradient = sharded.flat(model)
        early = _readable(stride)
        if run.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        scaler.step(optimizer)
        scaler.update()
        position = stride.state_dict()["position"]
        optimizer.zero_grad()
        yield Step(gradient, sharded.weights(model), scaler.get_scale(), position, early)


def _readable(stride: evenstride.Stride) -> bool:
    try:
        stride.state_dict()
    except StepInFlight:
        return False
    return True


def _island(run: Run) -> Any:
    """Return the ranks that hold one replica together, where there are several."""
    if len(run.mesh) < 2:
        return None
    mesh = init_device_mesh("cpu", run.mesh, mesh_dim_names=("island", "shard"))
    return mesh["shard"].get_group()


def _engine(run: Run) -> Any:
    layout = Layout(mesh=run.mesh)
    net = Net(layout, run.data_dtype)
    return sharded.sharded(net, layout) if run.engine == "fsdp" else DistributedDataParallel(net)


def _scaler(run: Run) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=run.dtype == "float16")


def _optimizer(model: nn.Module, run: Run) -> Any:
    match run.optimizer:
        case "sgd":
            return torch.optim.SGD(model.parameters(), lr=RATE)
        case "zero" | "zero-view" if run.engine != "plain":
            # Here, as this import warns of what torch itself will drop.
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(
                model.parameters(),
                torch.optim.Adam,
                parameters_as_bucket_view=run.optimizer == "zero-view",
                lr=RATE,
            )
    return torch.optim.Adam(model.parameters(), lr=RATE, fused=run.optimizer == "fused")


def _loss(model: nn.Module, x: Tensor, y: Tensor, run: Run) -> Tensor:
    half = torch.bfloat16 if run.dtype == "bfloat16" else torch.float16
    with torch.autocast("cpu", dtype=half, enabled=not run.precise):
        loss: Tensor = nn.functional.mse_loss(model(x), y)
    return loss


@contextlib.contextmanager
def _accumulating(stride: evenstride.Stride, model: nn.Module, run: Run) -> Iterator[None]:
    if run.micro is None:
        yield
    else:
        with stride.accumulate(model):
            yield


@contextlib.contextmanager
def _each_for_itself(wanted: bool) -> Iterator[None]:
    """Let every rank see the overflows of its own shard only, as if torch did not reduce them."""
    check = torch._amp_foreach_non_finite_check_and_unscale_

    def own(gradients: list[Any], found_inf: Tensor, inverse: Tensor) -> None:
        check([g.to_local() for g in gradients], found_inf, inverse)

    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", own)
        yield


def alone(run: Run) -> list[Step]:
    """Return the steps of one process on the union batches, in plain PyTorch.

    It skips the step that overflows, as its samples are there; the scale is not looked at.
    """
    model = Net(Layout(), run.data_dtype)
    plain = Run(engine="plain", dtype=run.dtype, optimizer=run.optimizer)
    optimizer, scaler = _optimizer(model, plain), _scaler(run)
    data = rows(run.batch * run.steps, run.data_dtype)
    positions = epoch_order(0, 0, len(data), shuffle=True).tolist()
    steps: list[Step] = []
    for number in range(run.steps):
        first = number * run.batch
        _, x, y = data[positions[first : first + run.batch]]
        far = FAR if run.overflow is not None and run.overflow[1] == number else 1.0
        scaler.scale(_loss(model, x, y, run) * far).backward()
        scaler.unscale_(optimizer)
        gradient = sharded.flat(model)
        if run.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        position, scale = first + run.batch, scaler.get_scale()
        steps.append(Step(gradient, sharded.weights(model), scale, position, early=False))
    return steps
