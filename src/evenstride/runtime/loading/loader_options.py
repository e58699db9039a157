"""Options of loaders, torch's and evenstride's, with the costs of samples and calibration.

``EVENSTRIDE_CALIBRATE=0.333:1.5,0.2:1.5`` makes a single process train with 0.333 of the global
batch for 1.5 seconds, then with 0.2 of it, and then end. Its trace has the step times, which
measure the script's step time as a function of the share.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from evenstride.core.spec import numbers
from evenstride.errors import ConfigError
from evenstride.runtime.loading.seeding import item_seeds
from evenstride.runtime.loading.shards import Shards
from evenstride.runtime.loading.streams import window_kind, window_length

_DECIDED_BY_US = ("batch_size", "sampler", "batch_sampler")
_FEWEST_STEPS = 4  # of each size in a calibration
# Number of samples by which ranks compare their cost functions.
_PROBES = 64

CostFn = Callable[[int], float] | Sequence[float] | npt.NDArray[Any] | torch.Tensor
"""A function of a sample's index, or one number per sample."""


class DataLoaderOptions(TypedDict, total=False):
    """Options of `torch.utils.data.DataLoader` that are passed on unchanged."""

    num_workers: int
    collate_fn: Callable[[Any], Any] | None
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """Options of a training loader beyond torch's own."""

    shuffle: bool = True  # in each epoch in another order
    drop_last: bool = False  # leave out the last, incomplete global batch.
    # Each rank keeps one part of the data set for a whole epoch; ``None`` if the policy wants so.
    by_epoch: bool | None = False
    weight_fn: Callable[[Any], float] | None = None  # weight of a (micro-)batch, such as its tokens
    # Largest micro-batch, in samples; with costs, in cost.
    max_micro_batch: int | None = None
    micro_batches: int | None = None  # of each rank in a full step
    costs: Costs | None = None  # of the samples; shares are then in proportion to cost
    seeded: bool = True  # each sample is loaded with a random seed of its own
    cold_prefetch: bool = False  # loader processes start before the first split is found.
    # Global batches of a calibration, one per step, until they end.
    sizes: Iterator[int] | None = None
    check_data: bool = True  # compare a few samples between the ranks
    max_steps: int | None = None  # of the whole training, after which the loop ends
    bucketed: bool = False  # micro-batches have samples of similar cost; costs count padded


def dataset_length(dataset: Any) -> int:
    """Return the number of samples; raise `ConfigError` without a length or samples."""
    if isinstance(dataset, Shards):
        return len(dataset)
    if window_kind(dataset):
        return window_length(dataset)
    if not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"a {type(dataset).__name__} is no data set that the loader can split; pass a "
            "map-style data set with __getitem__ and __len__, an IterableDataset, "
            "evenstride.Stream(source), evenstride.Shards(lengths, read), or a function that "
            "returns a batch of so many samples"
        )
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        raise ConfigError(
            f"{type(dataset).__name__} has no length, so evenstride cannot serve each sample "
            "exactly once; give it a __len__"
        ) from None
    if length < 1:
        raise ConfigError(f"the {type(dataset).__name__} has no samples; it needs at least 1")
    return length


def refuse_batching(options: dict[str, Any]) -> None:
    """Raise `ConfigError` for options that the loader sets itself."""
    for name in _DECIDED_BY_US:
        if name in options:
            raise ConfigError(
                f"{name} cannot be set: the loader splits the global batch of the Stride. Set "
                "Stride(global_batch=...), shuffle=, or max_micro_batch= instead"
            )
    if not options.get("in_order", True):
        raise ConfigError("in_order=False is not possible: batches must come in step order")


def check_options(options: DataLoaderOptions) -> None:
    """Raise `ConfigError` unless torch's loader accepts these options; starts no process."""
    refuse_batching(dict(options))
    try:
        DataLoader(TensorDataset(), batch_sampler=BatchStream([[0]]), **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"torch's DataLoader refuses these options: {error}") from None


def own_generator(seed: int, rank: int) -> torch.Generator:
    """Return the generator that seeds a loader's worker processes."""
    # By default torch would use the global generator and change its state. Each rank has its own
    # seed, because samples that are not seeded one by one use the seeds of the worker processes.
    own_seed = int(item_seeds(seed, 0, np.array([rank]))[0])
    return torch.Generator().manual_seed(own_seed >> 1)


class BatchStream(Sampler[list[Any]]):
    """A batch sampler whose iterators share one position; see `StepSampler`."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)


class Costs:
    """Cost of each sample of a data set, such as its tokens: a positive and finite number."""

    def __init__(self, cost_fn: CostFn, length: int) -> None:
        self._length = length
        self._function: Callable[[int], float] | None = None
        self._known = np.zeros(0)
        if callable(cost_fn):
            self._function = cost_fn
            return
        known = np.asarray(cost_fn, dtype=np.float64)
        if known.shape != (length,):
            raise ConfigError(
                f"cost_fn has shape {known.shape}; it must be a function of a sample's index, or "
                f"{length} numbers, one for each sample of the data set"
            )
        self._known = _checked(known, np.arange(length))

    def of(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the costs of some samples, ``(n,)``; fast if they were given as an array."""
        if self._function is None:
            return np.asarray(self._known[indices])
        return _checked(np.array([self._cost(index) for index in indices.tolist()]), indices)

    def _cost(self, index: int) -> float:
        assert self._function is not None, "otherwise the costs are known"
        try:
            return float(self._function(index))
        except Exception as error:
            raise ConfigError(
                f"cost_fn failed for sample {index} ({type(error).__name__}: {error}); it is "
                "called with a sample's index (not the sample) and must return a positive number"
            ) from error

    def digest(self) -> str:
        """Return a text that is equal on ranks with equal costs."""
        probes = np.linspace(0, self._length - 1, min(_PROBES, self._length)).astype(np.int64)
        # Calling a function for every sample could take minutes.
        costs = self._known if self._function is None else self.of(probes)
        return f"costs with the checksum {hashlib.sha256(costs.tobytes()).hexdigest()[:16]}"


def _checked(
    costs: npt.NDArray[np.float64], indices: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    wrong = ~(np.isfinite(costs) & (costs > 0))
    if wrong.any():
        first = int(np.argmax(wrong))
        raise ConfigError(
            f"cost_fn gives {costs[first]} for sample {indices[first]}; a cost must be a positive, "
            "finite number, such as the number of tokens (an empty text still costs something: 1)"
        )
    return costs


@dataclass(frozen=True, slots=True)
class CalibrationStage:
    """One batch size and the time for which it is used."""

    part: float  # of the global batch
    seconds: float  # at least so long, and at least a few steps


def parse_stages(text: str) -> tuple[CalibrationStage, ...]:
    """Return the stages in ``PART:SECONDS,...``; raise `ConfigError` if they are invalid."""
    pairs = [numbers(stage.replace(":", ",")) for stage in text.split(",")]
    stages = tuple(CalibrationStage(*pair) for pair in pairs if len(pair) == 2)
    if len(stages) < len(pairs) or not all(0 < s.part <= 1 and s.seconds >= 0 for s in stages):
        raise ConfigError(
            f"EVENSTRIDE_CALIBRATE is {text!r}; write PART:SECONDS,..., each PART a fraction of "
            "the global batch above 0 and at most 1, such as 0.333:1.5,0.2:1.5"
        )
    return stages


def batch_sizes(
    stages: tuple[CalibrationStage, ...],
    global_batch: int,
    now: Callable[[], float] = time.perf_counter,
) -> Iterator[int]:
    """Yield the size of each step, until every stage has had its time."""
    for stage in stages:
        size = max(1, round(stage.part * global_batch))
        started_s, steps = now(), 0
        while steps < _FEWEST_STEPS or now() < started_s + stage.seconds:
            yield size
            steps += 1


def calibration(text: str | None, world_size: int, global_batch: int) -> Iterator[int] | None:
    """Return the batch sizes of ``EVENSTRIDE_CALIBRATE``; ``None`` if it is not set."""
    if text is None:
        return None
    stages = parse_stages(text)
    if world_size > 1:
        raise ConfigError(
            "EVENSTRIDE_CALIBRATE measures one process on its own, but there are "
            f"{world_size}; unset it, or set WORLD_SIZE=1"
        )
    return batch_sizes(stages, global_batch)
