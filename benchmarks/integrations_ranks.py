"""One rank of `integrations.py`: trains the same model with each framework, block by block.

    integrations_ranks.py PLAN

A block is one epoch of a framework, from its set-up to its end. A hook of the optimizer notes the
time of each update, so a step time means the same in every framework: the time between two updates.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from evenstride.core.arrays import Shares
from evenstride.lab.demo.demo_script import (
    LEARNING_RATE,
    MOMENTUM,
    Bench,
    DemoTask,
    choose_batch,
    load_task,
)
from evenstride.runtime.engines.process_groups import take_down_group
from evenstride.runtime.store.store_server import meeting_at
from evenstride.runtime.stride import Stride

REPORT, NEWS = "report.json", "news.jsonl"
POLICIES = ("uniform", "adaptive")


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The blocks to train.

    Args:
        frameworks: Names in `FRAMEWORKS`; the first one is what the others are compared with.
        rounds: Rounds, in which each framework trains a block of each policy.
        cold_steps: Steps of a block that are not measured, by policy.
        steps: Measured steps of a block, by policy.
        step_s: Balanced step time that the global batch is chosen for.
        stores: Address and port of a store for each process group.
    """

    frameworks: tuple[str, ...]
    rounds: int
    cold_steps: dict[str, int]
    steps: dict[str, int]
    step_s: float
    stores: list[tuple[str, int]] = field(default_factory=list)

    def order(self) -> Iterator[tuple[int, str, str]]:
        """Yield round, framework and policy of each block.

        The order rotates, and is reversed in every other round, so that a drift cancels.
        """
        for number in range(self.rounds):
            first = number // 2 % len(self.frameworks)
            names = [*self.frameworks[first:], *self.frameworks[:first]]
            for name in reversed(names) if number % 2 else names:
                for policy in reversed(POLICIES) if number % 2 else POLICIES:
                    yield number, name, policy


@dataclass(frozen=True, slots=True)
class TrainedBlock:
    """A block as rank 0 measured it.

    Args:
        round: Number of its round.
        framework: Its framework.
        policy: Policy of the shares.
        steps_s: Times of the measured steps.
        shares: Shares at the end.
        whole_s: Time from set-up to end, cold steps included.
    """

    round: int
    framework: str
    policy: str
    steps_s: list[float]
    shares: Shares
    whole_s: float


@dataclass(slots=True)
class Work:
    """What a framework trains in a block: the same in every framework.

    Args:
        data: Samples of one epoch, each an id, an image and a label.
        batch: Samples per update over all ranks.
        net: The model.
        optimizer: Its optimizer.
        ends_s: Times of the updates so far.
    """

    data: Subset[Any]
    batch: int
    net: nn.Module
    optimizer: torch.optim.Optimizer
    ends_s: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, task: DemoTask, batch: int, steps: int) -> Work:
        """Return the work of a block of some steps."""
        count, net = len(task.train), task.net()
        data: Subset[Any] = Subset(task.train, [i % count for i in range(batch * steps)])
        optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        work = cls(data, batch, net, optimizer)
        optimizer.register_step_post_hook(lambda *_: work.mark())
        return work

    def rows(self) -> tuple[Tensor, ...]:
        """Return all ids, images and labels."""
        rows: tuple[Tensor, ...] = self.data.dataset[torch.tensor(self.data.indices)]
        return rows

    def mark(self) -> None:
        """Note the end of an update."""
        self.ends_s.append(time.perf_counter())

    def loader(self) -> DataLoader[Any]:
        """Return the loader that a script would have: with the batch of one process."""
        batch = self.batch // int(os.environ["WORLD_SIZE"])
        return DataLoader(self.data, batch_size=batch, shuffle=True)


def bare(work: Work) -> Shares:
    """Train with DDP and evenstride alone."""
    dist.init_process_group("gloo")
    stride = Stride(work.batch)
    loader = stride.loader(work.data)
    model = stride.watch(DistributedDataParallel(work.net))
    for _, x, y in loader:
        stride.scale(F.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
        work.optimizer.step()
        work.optimizer.zero_grad()
    return closed(stride)


def accelerate(work: Work) -> Shares:
    """Train with Accelerate."""
    from accelerate.state import AcceleratorState, GradientState

    from evenstride.integrations.accelerate import EvenAccelerator

    accelerator = EvenAccelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(work.net, work.optimizer, work.loader())
    for _, x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    shares = closed(accelerator.stride)
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return shares


def lightning(work: Work) -> Shares:
    """Train with Lightning's Trainer."""
    import lightning as L

    from evenstride.integrations.lightning import EvenStrategy

    class Classifier(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = work.net

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return F.cross_entropy(self.net(batch[1]), batch[2])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer

    strategy = EvenStrategy()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), work.loader())
    assert strategy.stride is not None, "fit has read the loader"
    return closed(strategy.stride)


def transformers(work: Work) -> Shares:
    """Train with transformers' Trainer."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers import TrainingArguments

    from evenstride.integrations.transformers import EvenTrainer

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = work.net

        def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.net(pixels)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def collate(samples: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
        _, pixels, labels = (torch.stack(each) for each in zip(*samples, strict=True))
        return {"pixels": pixels, "labels": labels}

    loader = work.loader()
    args = TrainingArguments(
        output_dir=os.environ["EVENSTRIDE_BENCHMARK"],
        per_device_train_batch_size=loader.batch_size,
        num_train_epochs=1,
        max_grad_norm=0.0,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    constant = torch.optim.lr_scheduler.ConstantLR(work.optimizer, 1.0)
    trainer = EvenTrainer(
        model=Classifier(),
        args=args,
        data_collator=collate,
        train_dataset=work.data,
        optimizers=(work.optimizer, constant),
    )
    trainer.train()
    shares = closed(trainer.stride)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return shares


def ray(work: Work) -> Shares:
    """Train with Ray Train in the processes of torchrun."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    from evenstride.integrations.ray import prepare

    found: list[Shares] = []

    def train() -> None:
        stride, loader, model = prepare(work.loader(), work.net)
        for _, x, y in loader:
            stride.scale(F.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
            work.optimizer.step()
            work.optimizer.zero_grad()
        found.append(closed(stride))

    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=0)).fit()
    return found[0]


def tensorflow(work: Work) -> Shares:
    """Train the same network, built from the layers of Keras, with TensorFlow."""
    import keras
    import tensorflow as tf

    from evenstride.integrations.tensorflow import TensorFlowStride

    dist.init_process_group("gloo")
    _, images, labels = work.rows()
    model = keras.Sequential([keras.Input((8, 8, 1)), *keras_layers(), keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    stride = TensorFlowStride(work.batch)
    loader = stride.loader((images.permute(0, 2, 3, 1).numpy(), labels.numpy()))
    stride.watch(model, optimizer)

    @tf.function(input_signature=loader.element_spec)  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for x, y in loader:
        step(x, y)
        work.mark()
    del os.environ["TF_CONFIG"]  # of this block's process group
    return closed(stride)


def keras_layers() -> Iterator[Any]:
    """Yield the layers of the demo's network for digits, except for the last one."""
    from keras import layers

    for channels, groups in ((64, 4), (128, 8), (128, 8)):
        yield layers.Conv2D(channels, 3, padding="same")
        yield layers.GroupNormalization(groups)
        yield layers.ReLU()
    yield layers.AveragePooling2D(4)
    yield layers.Flatten()


# The first one is what the others are compared with.
FRAMEWORKS: dict[str, Callable[[Work], Shares]] = {
    "bare": bare,
    "accelerate": accelerate,
    "lightning": lightning,
    "transformers": transformers,
    "ray": ray,
    "tensorflow": tensorflow,
}


def closed(stride: Stride) -> Shares:
    """Close a `Stride` and return its last shares."""
    shares = stride.shares
    stride.close()
    return shares


@contextlib.contextmanager
def process_group(store: tuple[str, int]) -> Iterator[None]:
    """Let a framework create its process group inside, in a store that no other group has used."""
    os.environ.update(meeting_at(*store))
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.barrier()  # rank 0 may hold what the others still read
            take_down_group()
        gc.collect()


def batch_of(task: DemoTask, step_s: float) -> int:
    """Return a global batch whose balanced step takes about ``step_s``; collective."""
    dist.init_process_group("gloo")
    bench = Bench(task)
    bench.measure(64, 1.0)  # warms up
    rates: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(rates, 64 / bench.measure(64, 3.0))
    batch = choose_batch(rates, step_s, 1 << 20)
    return batch - batch % dist.get_world_size()


def main() -> None:
    """Train all blocks; rank 0 writes a line for each, and the report."""
    warnings.simplefilter("ignore")
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    plan = BlockPlan(**json.loads((folder / "plan.json").read_text()))
    os.environ["EVENSTRIDE_BENCHMARK"] = str(folder / "trainer")
    task, blocks = load_task(None), list[TrainedBlock]()
    with process_group(plan.stores[0]):
        batch = batch_of(task, plan.step_s)
    with (folder / NEWS).open("a") as news:
        for store, (turn, name, policy) in zip(plan.stores[1:], plan.order(), strict=True):
            os.environ["EVENSTRIDE_POLICY"] = policy
            cold, steps = plan.cold_steps[policy], plan.steps[policy]
            work, begun_s = Work.of(task, batch, cold + steps), time.perf_counter()
            with process_group(store):
                shares = FRAMEWORKS[name](work)
            whole_s = time.perf_counter() - begun_s
            ends_s = work.ends_s[cold - 1 :]
            steps_s = [after - before for before, after in pairwise(ends_s)]
            assert len(steps_s) == steps, f"{name} made {len(work.ends_s)} updates"
            blocks.append(TrainedBlock(turn, name, policy, steps_s, shares, whole_s))
            if rank == 0:
                news.write(json.dumps(asdict(blocks[-1])) + "\n")
                news.flush()
    if rank == 0:
        report = {"global_batch": batch, "blocks": [asdict(one) for one in blocks]}
        (folder / REPORT).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
