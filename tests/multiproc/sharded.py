"""FSDP2 and HSDP runs: what each rank does, and what one process does with the same samples."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import TensorDataset

import evenstride
from evenstride.runtime.engines.fsdp import gathered, island_of
from evenstride.runtime.timing.step_timer import StepTimer
from tests.inside import session
from tests.multiproc.loops import KeptSteps, burn, quartile
from tests.multiproc.training import FEATURES, Loop, rows
from tests.order import epoch_order

RATE = 0.05
SHARDS_ON_CPU = hasattr(torch.cpu.current_stream(), "record_event")
needs_shards_on_cpu = pytest.mark.skipif(
    not SHARDS_ON_CPU, reason="FSDP2 of torch 2.6 needs a card"
)

WORK = 240  # of the smallest share, in each layer and pass; some 20 ms


@dataclass(frozen=True)
class Layout:
    """How a model is sharded; plain data, so that it can be sent to a rank.

    Args:
        mesh: ranks of each dimension; two of them mean HSDP, islands first.
        reshard: whether parameters are given up between forward and backward.
        tied: whether two layers share their weight.
        half: whether parameters are bfloat16 in forward and backward.
        checkpointed: whether activations are computed again in the backward pass.
    """

    mesh: tuple[int, ...] = (2,)
    reshard: bool = True
    tied: bool = False
    half: bool = False
    checkpointed: bool = False


class Net(nn.Module):
    """A small model whose parameters no number of ranks divides, the same everywhere."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(3)
        self.inner = nn.Linear(FEATURES, 7)
        self.hidden, self.again = nn.Linear(7, 7), nn.Linear(7, 7)
        self.outer = nn.Linear(7, 1)
        torch.set_rng_state(state)
        if layout.tied:
            self.again.weight = self.hidden.weight
        self._checkpointed = layout.checkpointed
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number per row."""
        x = self.inner(x).tanh()
        if self._checkpointed:
            x = torch.utils.checkpoint.checkpoint(self._middle, x, use_reentrant=False)
        else:
            x = self._middle(x)
        result: Tensor = self.outer(x) * 1.0  # not a view of what FSDP returns
        return result

    def _middle(self, x: Tensor) -> Tensor:
        result: Tensor = self.again(self.hidden(x).tanh()).tanh()
        return result


def sharded(net: Net, layout: Layout) -> Any:
    """Return the same model under FSDP2, layer by layer."""
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", layout.mesh, mesh_dim_names=_names(layout)),
        "reshard_after_forward": layout.reshard,
    }
    if layout.half:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(net.inner, **options)
    if layout.tied:
        fully_shard([net.hidden, net.again], **options)
    else:
        fully_shard(net.hidden, **options)
        fully_shard(net.again, **options)
    return fully_shard(net, **options)


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss."""
        return nn.functional.mse_loss(self.layer(x), y)


def order_of_callbacks(rank: int) -> tuple[list[str], list[float], list[float]]:
    """Return who acts in what order after a backward pass, and the gradient with its truth."""
    del rank
    stride = evenstride.Stride(global_batch=8, policy="uniform")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    whole = WithLoss()
    model: Any = copy.deepcopy(whole)
    fully_shard(model.layer, mesh=mesh)
    stride.watch(fully_shard(model, mesh=mesh))
    seen: list[str] = []

    def noted(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def noting(*args: Any) -> None:
            seen.append(name)
            call(*args)

        return noting

    state, name = model._get_fsdp_state(), "_root_post_backward_final_callback"
    loader = stride.loader(rows(8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, name, noted("FSDP2", getattr(state, name)))
        ready = noted("evenstride", StepTimer.gradients_ready)
        patch.setattr(StepTimer, "gradients_ready", ready)
        for _, x, y in loader:
            stride.scale(model(x, y)).backward()  # type: ignore[no-untyped-call]
    _, x, y = rows(8).tensors
    whole(x, y).backward()
    found = [p.grad.full_tensor().flatten() for p in model.parameters()]
    truth = [p.grad.flatten() for p in whole.parameters() if p.grad is not None]
    stride.close()
    return seen, torch.cat(found).tolist(), torch.cat(truth).tolist()


def uncounted(rank: int, trace: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Train a model whose waits cannot be distinguished from work, as on CUDA, with unequal ranks.

    Returns:
        What was raised, or the shares after each step and the summary.
    """
    stride = evenstride.Stride(global_batch=8, trace=trace, **asked)
    layout = Layout()
    model = sharded(Net(layout, torch.float32), layout)
    loader = stride.loader(TensorDataset(torch.ones(8 * 40, FEATURES)))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("evenstride.runtime.engines.fsdp.why_uncounted", lambda _: "as on CUDA")
            stride.watch(model)
        shares = []
        for (x,) in loader:
            burn(128, 20 * rank)
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
            model.zero_grad()
            shares.append(stride.shares)
        return {
            "shares": shares,
            "summary": stride.summary().to_dict(),
            "text": str(stride.summary()),
        }
    except evenstride.ConfigError as error:
        return {"error": str(error)}
    finally:
        stride.close()


def _names(layout: Layout) -> tuple[str, ...]:
    return ("island", "shard")[-len(layout.mesh) :]


def flat(model: nn.Module) -> list[float]:
    """Return all gradients, whole, as one list of numbers; collective where sharded."""
    return _numbers([p.grad for p in model.parameters() if p.grad is not None])


def weights(model: nn.Module) -> list[float]:
    """Return all parameters, whole, as one list of numbers; collective where sharded."""
    return _numbers([p.detach() for p in model.parameters()])


def _numbers(tensors: list[Any]) -> list[float]:
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.reshape(-1).double() for t in whole]).tolist()


def train(
    rank: int, loop: Loop, layout: Layout, wait_counted: bool = True
) -> tuple[list[list[float]], list[float]]:
    """Return the reduced gradient of every step and the final weights, as this rank sees them."""
    with pytest.MonkeyPatch.context() as patch:
        if loop.broken:
            patch.setattr("evenstride.runtime.loss.training_step.loss_factor", lambda *_: 1.0)
        stride = evenstride.Stride(global_batch=loop.batch, policy=loop.policy)
        try:
            return _train(rank, stride, loop, layout, wait_counted)
        finally:
            stride.close()


def _train(
    rank: int, stride: evenstride.Stride, loop: Loop, layout: Layout, wait_counted: bool
) -> tuple[list[list[float]], list[float]]:
    loader = stride.loader(rows(loop.length, loop.torch_dtype), max_micro_batch=loop.micro)
    with waits_counted(wait_counted):
        model = stride.watch(sharded(Net(layout, loop.torch_dtype), layout))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    gradients: list[list[float]] = []
    while True:
        for _, x, y in loader:
            with _accumulating(stride, model, loop):
                loss = nn.functional.mse_loss(model(x), y.to(x.dtype))
                if rank == loop.poison:
                    loss = loss / torch.zeros(())
                stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            if stride.synced:
                if loop.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
                gradients.append(flat(model))
                optimizer.step()
                optimizer.zero_grad()
                if len(gradients) == loop.steps:
                    return gradients, weights(model)


@contextlib.contextmanager
def waits_counted(counted: bool) -> Iterator[None]:
    """Let `Stride.watch` count the waits in the layers as waits, or not."""
    with pytest.MonkeyPatch.context() as patch:
        # Exact for any split, also for those that islands do not have in a run.
        patch.setattr("evenstride.runtime.session.watch_rules.check_island", lambda *_: None)
        if not counted:
            patch.setattr(
                "evenstride.runtime.session.model_watcher.subtract_collectives", lambda *_: None
            )
        yield


@contextlib.contextmanager
def _accumulating(stride: evenstride.Stride, model: nn.Module, loop: Loop) -> Iterator[None]:
    if loop.micro is None:
        yield
    else:
        with stride.accumulate(model):
            yield


def doubled(_: int, groups: int) -> list[float]:
    """Return twice a tensor sharded on islands, after other groups have taken names."""
    for _ in range(groups):
        dist.new_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    tensor = distribute_tensor(torch.arange(6.0), mesh, (Replicate(), Shard(0)))
    return _numbers([tensor * 2])


def alone(loop: Loop, layout: Layout) -> list[list[float]]:
    """Return the gradients of one process on the union batches, in plain PyTorch."""
    model = Net(layout, loop.torch_dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    data = rows(loop.length, loop.torch_dtype)
    gradients: list[list[float]] = []
    epoch = 0
    while len(gradients) < loop.steps:
        positions = epoch_order(0, epoch, loop.length, shuffle=True).tolist()
        for start in range(0, loop.length, loop.batch):
            _, x, y = data[positions[start : start + loop.batch]]
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            if loop.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
            gradients.append(flat(model))
            optimizer.step()
            optimizer.zero_grad()
        epoch += 1
    return gradients[: loop.steps]


class Burning(nn.Linear):
    """A layer that does real work in both passes, and keeps how long it took by itself."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.times, self.took_s = 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return as many features as there were."""
        self.took_s += burn(128, self.times)
        y = super().forward(x).tanh()
        y.register_hook(self._burn_again)  # type: ignore[no-untyped-call]
        return y

    def _burn_again(self, _: Tensor) -> None:
        self.took_s += burn(128, self.times)


def timed(
    rank: int, policy: str, layout: Layout, *, counted: bool = True, ahead: bool = False
) -> tuple[float, list[float]]:
    """Return the busy time of this rank in a step over its work, and all busy times in seconds.

    The work is as long for the smallest share whatever that is, and grows with the share.

    Args:
        rank: this rank.
        policy: with fixed shares.
        layout: how the model is sharded.
        counted: whether the waits in the layers are counted as waits.
        ahead: whether gathering is started early, and waited for later.

    Returns:
        The first number is the first quartile over the steps: both times are of the same step, so
        that whatever else runs on the machine slows both.
    """
    stride = evenstride.Stride(global_batch=20, policy=policy)
    records = KeptSteps(session(stride).state.clock.timer.finished)
    session(stride).state.clock.timer.report_to(records)
    layers = [Burning(), Burning()]
    model: Any = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", layout.mesh, mesh_dim_names=_names(layout))
    for part in [*layers, model]:
        fully_shard(part, mesh=mesh)
    with waits_counted(counted):
        stride.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    work_s: list[float] = []
    for (x,) in stride.loader(TensorDataset(torch.ones(20 * 9, 4)), seeded=False):
        for layer in layers:
            layer.times, layer.took_s = WORK * len(x) // min(stride.shares), 0.0
            if ahead:
                layer.unshard(async_op=True)  # type: ignore[operator]
        stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        work_s.append(sum(layer.took_s for layer in layers))
    stride.close()
    warm = [r for r in records if r.step >= 2]
    return quartile([r.busy_s / work_s[r.step] for r in warm]), [r.busy_s for r in warm]


class Training:
    """A sharded model with an optimizer that remembers, in a loop that can stop and go on."""

    def __init__(self, batch: int, policy: str) -> None:
        self.stride = evenstride.Stride(global_batch=batch, policy=policy)
        self.loader = self.stride.loader(rows(100))
        layout = Layout(mesh=(dist.get_world_size(),))
        self.model = self.stride.watch(sharded(Net(layout, torch.float64), layout))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def train(self, steps: int) -> list[list[float]]:
        """Return the weights after each of the next steps."""
        seen: list[list[float]] = []
        while True:
            for _, x, y in self.loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.stride.scale(loss).backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                self.optimizer.zero_grad()
                seen.append(weights(self.model))
                if len(seen) == steps:
                    return seen

    def save(self, folder: str) -> None:
        """Save model, optimizer and position; collective."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "stride": self.stride}
        save(state, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        """Restore what another number of ranks may have saved; collective."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "stride": self.stride}
        load(state, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )


Run = tuple[dict[str, Any], list[float], list[list[float]]]


def uninterrupted(rank: int, folder: str, policy: str, steps: tuple[int, int]) -> Run:
    """Train, save on the way and go on; return position and weights there, and those after."""
    training = Training(24, policy)
    there = training.train(steps[0])[-1]
    training.save(folder)
    position = training.stride.state_dict()
    after = training.train(steps[1])
    training.stride.close()
    return position, there, after


def resumed(rank: int, folder: str, policy: str, steps: int) -> Run:
    """Go on where another run saved; return the same as it."""
    training = Training(24, policy)
    training.load(folder)
    position, there = training.stride.state_dict(), weights(training.model)
    after = training.train(steps)
    training.stride.close()
    return position, there, after


def evaluated(rank: int, layout: Layout) -> tuple[list[list[float]], list[float]]:
    """Evaluate before each of three steps, the second rank alone; see `evaluated_alone`."""
    return _evaluated(sharded(Net(layout, torch.float64), layout), 2 * rank)


def evaluated_alone(layout: Layout) -> tuple[list[list[float]], list[float]]:
    """Return what each evaluation computed, and the weights in the end."""
    return _evaluated(Net(layout, torch.float64), 1)


def _evaluated(model: nn.Module, times: int) -> tuple[list[list[float]], list[float]]:
    _, x, y = rows(8).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    outputs: list[list[float]] = []
    for _ in range(3):
        with torch.no_grad(), gathered(model):
            results = [model(x).flatten().tolist() for _ in range(times)]
        outputs += results[-1:]
        nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return outputs, weights(model)


def evaluated_unequally(_rank: int) -> tuple[int, float]:
    """Return this rank's batches of an evaluation in the midst of training, and its exact mean."""
    stride = evenstride.Stride(global_batch=16, policy="static:3,13")
    loader, layout = stride.loader(rows(48)), Layout(mesh=(2,))
    held_out = stride.loader(rows(40), train=False, max_micro_batch=4)
    model = stride.watch(sharded(Net(layout, torch.float64), layout))
    batches, reported = 0, 0.0
    for _, x, y in loader:
        stride.scale(nn.functional.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
        total, count = 0.0, 0
        with torch.no_grad():
            for _, x_seen, y_seen in held_out:
                total += float((model(x_seen) - y_seen).square().sum())
                count, batches = count + len(x_seen), batches + 1
        reported = stride.mean(total, count)
    stride.close()
    return batches, reported


def islands(rank: int, layout: Layout) -> tuple[int, ...]:
    """Return the island that this rank finds itself on."""
    return island_of(sharded(Net(layout, torch.float64), layout))
