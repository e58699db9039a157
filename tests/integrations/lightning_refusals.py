"""What Lightning's Trainer may ask for and does not get: modules, loaders and options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from evenstride.integrations.lightning import EvenStrategy
from tests.integrations.lightning_programs import (
    BATCH,
    SAMPLES,
    UNEQUAL,
    ByHand,
    Regression,
    Row,
    error_of,
    evaluation,
    fitted,
    launched,
    loader,
)
from tests.multiproc.training import rows


class Streamed(IterableDataset[Any]):
    """Samples in an order of their own."""

    def __iter__(self) -> Iterator[Any]:
        yield from range(SAMPLES)


class Fetching(Regression):
    """A module that fetches its batches."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


class Gathering(Regression):
    """A module that communicates in its training step."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.all_gather(self.loss(batch), sync_grads=True).mean()


class Searching(Regression):
    """A module whose optimizer needs several gradients per step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.net.parameters())


class Summed(Regression):
    """A module whose loss is a sum over the batch."""

    def loss(self, batch: Row) -> Tensor:
        targets = torch.zeros(len(batch[0]), dtype=torch.long)
        return F.cross_entropy(self.net(batch[1]).expand(-1, 2), targets, reduction="sum")


FACTS: dict[str, tuple[str, ...]] = {
    "stream": ("Streamed", "IterableDataset"),
    "sampler": ("WeightedRandomSampler", "Subset"),
    "batch sampler": ("list", "batch_size="),
    "no loader": ("range", "DataLoader"),
    "several loaders": ("CombinedLoader",),
    "a loader in a dictionary": ("CombinedLoader",),
    "dataloader_iter": ("dataloader_iter",),
    "scheduled accumulation": ("GradientAccumulationScheduler",),
    "LBFGS": ("LBFGS",),
    "reload": ("reload_dataloaders_every_n_epochs", "accumulate_grad_batches=3"),
    "interval": ("val_check_interval=4", "accumulate_grad_batches=3"),
    "micro-batches by hand": ("max_micro_batch=2",),
    "too few to evaluate": ("1 sample(s)", "2 ranks"),
    "gather": ("all_gather()", "max_micro_batch=None"),
    "sum": ("sum",),
}


def refusals(rank: int) -> dict[str, str]:
    """Ask for what does not work; return the errors."""

    def fit(*args: Any, even: dict[str, Any] | None = None, **options: Any) -> Callable[[], Any]:
        return lambda: fitted(EvenStrategy(**(even or {"policy": UNEQUAL})), *args, **options)

    data = rows(SAMPLES)
    weighted = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    both = CombinedLoader({"a": loader(), "b": loader()}, "min_size")
    schedule = GradientAccumulationScheduler({0: 1, 1: 2})
    cases: dict[str, Callable[[], Any]] = {
        "stream": fit(None, DataLoader(Streamed(), batch_size=BATCH)),
        "sampler": fit(None, DataLoader(data, batch_size=BATCH, sampler=weighted)),
        "batch sampler": fit(None, DataLoader(data, batch_sampler=[[0, 1], [2]])),
        "no loader": fit(None, range(8)),
        "several loaders": fit(None, both),
        "a loader in a dictionary": fit(None, {"a": loader()}),
        "dataloader_iter": fit(Fetching()),
        "scheduled accumulation": fit(callbacks=[schedule]),
        "LBFGS": fit(Searching()),
        "reload": fit(accumulate_grad_batches=3, reload_dataloaders_every_n_epochs=1),
        "interval": fit(accumulate_grad_batches=3, val_check_interval=4),
        "micro-batches by hand": fit(ByHand(), even={"max_micro_batch": 2}),
        "too few to evaluate": fit(val=evaluation(1)),
        "gather": fit(Gathering()),
        "sum": fit(Summed()),
    }
    with launched(rank):
        return {name: error_of(run) for name, run in cases.items()}
