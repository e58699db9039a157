"""Compares the settings of a loader, and a few of its samples, between the ranks.

Every rank looks up its part of each global batch by index. If the ranks have different data, some
samples are trained twice and others never, and no error shows it. Causes are random numbers or a
`random_split` without a seed, or data that is already split by rank.

Machines of different kinds decode and transform the same file to slightly different numbers, so a
digest of the bytes alone would refuse equal data. A `Likeness` separates what must be equal
(labels, shapes, texts) from what may differ a little (pixels, features).
"""

from __future__ import annotations

import dataclasses
import io
import logging
import pickle
import re
import time
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import accumulate
from pathlib import PurePath
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Subset

from evenstride.core.policy import Policy
from evenstride.core.sampling.draw import ShardAssignment
from evenstride.core.sampling.partition import UNKNOWN_LENGTH, EpochCursor
from evenstride.core.sync_modes.mode_specs import LocalSgd, SyncMode
from evenstride.errors import ConfigError, RanksDisagree
from evenstride.runtime.coordination.agreement import Plain, listed, require_equal
from evenstride.runtime.loading.loader_options import LoaderOptions, dataset_length
from evenstride.runtime.loading.position import EpochOrder
from evenstride.runtime.loading.seeding import SeededDataset, item_seeds
from evenstride.runtime.loading.shards import ShardReader, digest, indexed, lengths_of
from evenstride.runtime.loading.streams import first_samples, window_kind
from evenstride.runtime.synchronisation.synchroniser import refuse_weights
from evenstride.runtime.usage_errors import check_whole

logger = logging.getLogger("evenstride")

# Arrays with more numbers than this are images or signals, which decoders round differently.
_SMALL = 64
_PARTS = 8
_WINDOW = 16
# Arrays are thinned out to about this many numbers before they are averaged.
_MOST_NUMBERS = 1 << 20
_MOST_NEAR = 8  # arrays per sample whose numbers are compared
_DEEPEST = 8
_LONGEST = 1000
# As a fraction of the root mean square of an array.
_TOLERANCE, _TOLERANCE_OF_SMALL = 0.03, 1e-4

_PLACE = re.compile(r"^(?:/|~|\\\\|[A-Za-z]:[\\/]|[a-z][a-z0-9+.-]*://)\S")
_BUDGET_S = 0.05  # after which no further sample is compared
_TOO_SLOW_S = 0.125  # after which a sample is not loaded a second time.
# Places in the data set at which samples are compared, in this order.
_PLACES = (0.0, 0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875)
_DEEPEST_WRAPPER = 5  # nested wrappers of a data set that are searched
_FEW = 1000  # indices of a subset that are examined
_LONG = 10_000

SPLIT = (
    "the data set is already split by rank; give every rank the whole data set, and the loader "
    "splits it"
)
_CAUSES = {
    "split": "Likely cause: random_split() without a seeded generator. Pass "
    "generator=torch.Generator().manual_seed(0).",
    "part": f"Likely cause: {SPLIT}.",
    "": "Likely cause: the data set consists of random numbers without a seed (call "
    "torch.manual_seed(0) before creating it), or it is already split by rank (give every rank "
    "the whole data set, and the loader splits it).",
}


class LoaderSettings(Protocol):
    """The settings of a run that concern its loaders."""

    @property
    def global_batch(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def max_share(self) -> int | None: ...
    @property
    def quantum(self) -> int | None: ...
    @property
    def mode(self) -> SyncMode: ...
    @property
    def chosen(self) -> bool: ...
    @property
    def decides(self) -> Policy[Any]: ...


class LoaderCalls(Protocol):
    """The collective calls that are needed to create a loader."""

    rank: int

    def seed_to_compare(self, seed: int) -> int | None:
        """Return the seed for comparing samples between ranks; ``None`` to compare none."""

    def agree(
        self, call: str, show: Callable[[], Plain], judge: Callable[[list[Plain]], Plain]
    ) -> Plain:
        """Return the leader's verdict on what all ranks show; a collective call."""


def layout(dataset: Any, asked: LoaderOptions, processes: int, seed: int | None) -> Plain:
    """Return the settings that all ranks must share, and those of this rank, as JSON types."""
    return {
        "length": dataset_length(dataset),
        "shards": window_kind(dataset) or digest(lengths_of(dataset)),
        "shuffle": asked.shuffle,
        "drop_last": asked.drop_last,
        "by_epoch": asked.by_epoch,
        "weighted": asked.weight_fn is not None,
        "micro": asked.max_micro_batch,
        "micro_batches": asked.micro_batches,
        "lanes": max(processes, 1),
        "cold_prefetch": asked.cold_prefetch,
        "max_steps": asked.max_steps,
        "data": {} if seed is None or not asked.check_data else look(dataset, seed, processes),
    }


def judge_loader(shown: list[Plain], topic: str = "the training loader") -> Plain:
    """Compare settings and data; if one rank has micro-batches, all ranks need `accumulate`."""
    micro, lanes, data = (
        tuple(mine.pop(name) for mine in shown) for name in ("micro", "lanes", "data")
    )
    require_equal(shown, topic, {"length": f"probably {SPLIT}"})
    judge_data(data, topic)
    return {**shown[0], "micro": micro, "lanes": lanes}


def order_of(dataset: Any, agreed: Plain, asked: LoaderOptions, seed: int) -> EpochOrder:
    """Return the layout of a training loader's epochs, from what the ranks agreed on."""
    shards = lengths_of(dataset)
    return EpochOrder(
        length=agreed["length"],
        seed=seed,
        shuffle=asked.shuffle,
        drop_last=asked.drop_last,
        by_epoch=bool(asked.by_epoch),
        shards=shards,
        lanes=tuple(agreed["lanes"]) if shards else (),
        windows=window_kind(dataset),
        unlimited=agreed["length"] == UNKNOWN_LENGTH,
    )


def policy_partitions(dataset: Any, settings: LoaderSettings, *, by_cost: bool) -> bool:
    """Return whether a loader cuts the data set into parts because its policy wants it."""
    wanted = getattr(settings.decides, "partition", "step") == "epoch"
    possible = settings.mode.lockstep and not (lengths_of(dataset) or window_kind(dataset))
    return wanted and possible and not by_cost


def longest_tail(agreed: Plain, batch: int) -> int:
    """Return the most samples that the last, short step of an epoch may have; 0 without one."""
    if agreed["drop_last"]:
        return 0
    return batch - 1 if agreed["length"] == UNKNOWN_LENGTH else int(agreed["length"] % batch)


def dealing(dataset: Any, agreed: Plain) -> ShardAssignment | None:
    """Return how an evaluation of shards begins; ``None`` for other data."""
    return order_of(dataset, agreed, LoaderOptions(shuffle=False), seed=0).dealing(epoch=0)


def check_loader(
    dataset: Any,
    asked: LoaderOptions,
    settings: LoaderSettings,
    global_batch: int,
    *,
    by_cost: bool,
) -> None:
    """Raise `ConfigError` unless a training loader with these options is possible."""
    length = dataset_length(dataset)
    if asked.drop_last and EpochCursor(length, global_batch, drop_last=True).end == 0:
        raise ConfigError(
            f"drop_last leaves no batch: the data set has {length} samples, fewer than the global "
            f"batch of {global_batch}; lower the global batch or leave drop_last out"
        )
    check_micro_batch(asked.max_micro_batch)
    _check_number(asked, by_cost=by_cost)
    _check_quantum(asked.max_micro_batch, settings.quantum or 1, by_cost=by_cost)
    check_unaligned_loader(settings.mode, dataset, asked, by_cost=by_cost)
    if asked.max_steps is not None:
        check_whole("max_steps", asked.max_steps, least=1)
    other = "partition='epoch'" if asked.by_epoch else "cost_fn" if by_cost else ""
    if asked.bucketed and not by_cost:
        raise ConfigError(
            "bucketed=True orders samples by cost, but there are no costs; pass cost_fn, such as "
            "the lengths of the samples, or leave it out"
        )
    if kind := window_kind(dataset):
        _check_windows(kind, length, settings, other)
    if other and lengths_of(dataset):
        raise ConfigError(
            f"{other} needs samples from anywhere in the data set, but Shards are read "
            f"sequentially by one rank each; leave {other.partition('=')[0]} out, or use a "
            "map-style data set"
        )


def _check_windows(kind: str, length: int, settings: LoaderSettings, other: str) -> None:
    """Raise `ConfigError` for what a stream or a batch function cannot do."""
    if other:
        raise ConfigError(
            f"{other} needs samples from anywhere in the data set, but every rank reads a {kind} "
            f"in order; leave {other.partition('=')[0]} out, or use a map-style data set"
        )
    if kind == "function" and settings.chosen:
        raise ConfigError(
            "the global batch is chosen at the end of each epoch, but a batch function has no "
            "epochs; give global_batch a number, or use a data set or evenstride.Stream"
        )
    if isinstance(settings.mode, LocalSgd) and kind == "stream" and length == UNKNOWN_LENGTH:
        raise ConfigError(
            f'sync="{settings.mode}" averages the weights after the last step of an epoch, but '
            "the stream has no known length; pass evenstride.Stream(source, length=...)"
        )


def check_unaligned_loader(
    mode: SyncMode, dataset: Any, asked: LoaderOptions, *, by_cost: bool
) -> None:
    """Refuse ways to split samples that need the same steps on all ranks."""
    if asked.weight_fn is not None:
        refuse_weights(mode)
    if mode.lockstep:
        return
    asked_for = {
        "cost_fn": by_cost,
        "micro_batches": asked.micro_batches is not None,
        'partition="epoch"': bool(asked.by_epoch),
        "Shards": bool(lengths_of(dataset)),
        f"a {window_kind(dataset)}": bool(window_kind(dataset)),
    }
    if asked.max_steps is not None:
        raise ConfigError(
            f'max_steps counts steps of all workers together, but with sync="{mode}" workers have '
            'no step in common; leave the loop after some epochs, or use sync="bsp-ps"'
        )
    for what, given in asked_for.items():
        if given:
            raise ConfigError(
                f"{what} splits samples over all workers of a step, but with "
                f'sync="{mode}" workers have no step in common; leave it out, or use sync="bsp-ps"'
            )


def _check_quantum(micro: int | None, quantum: int, *, by_cost: bool) -> None:
    if by_cost and quantum > 1:
        raise ConfigError(
            "cost_fn splits samples by cost, so a rank's number of samples is not a "
            f"multiple of quantum={quantum}; leave one of them out"
        )
    if quantum > 1 and micro is not None and quantum % micro:
        raise ConfigError(
            f"shares of this rank are multiples of quantum={quantum}, but max_micro_batch={micro} "
            f"does not divide it; use max_micro_batch={quantum}, or a number that divides it"
        )


def check_micro_batch(size: int | None) -> None:
    if size is not None:
        check_whole("max_micro_batch", size, least=1)


def _check_number(asked: LoaderOptions, *, by_cost: bool) -> None:
    if asked.micro_batches is None:
        return
    check_whole("micro_batches", asked.micro_batches, least=1)
    most = asked.max_micro_batch
    for name, given in ((f"max_micro_batch={most}", most), ("cost_fn", by_cost)):
        if given:
            raise ConfigError(
                f"micro_batches={asked.micro_batches} sets the number of micro-batches, and {name} "
                "sets their size; leave one of them out. Stride(max_share=...) limits the size too"
            )


class Likeness:
    """Outline of a sample of any type; objects without stable content count by type alone."""

    def __init__(self, sample: Any) -> None:
        self._exact, self._bits = xxhash.xxh3_64(), xxhash.xxh3_64()
        self._near: list[list[float]] = []
        self._add(sample, 0)

    def to_plain(self) -> Plain:
        return {
            "exact": self._exact.hexdigest(),
            "bits": self._bits.hexdigest(),
            "near": self._near,
        }

    def _add(self, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, (np.ndarray, np.generic, float, complex)):
            self._add_array(np.asarray(value))
        elif value is None or isinstance(value, (bool, int, str, bytes, PurePath, Enum)):
            self._note(_stable(value))
        elif callable(getattr(value, "tobytes", None)) and hasattr(value, "mode"):
            self._add_array(np.asarray(value))  # a PIL image
        elif depth < _DEEPEST and len(parts := _parts(value)) <= _LONGEST:
            self._note(f"{type(value).__name__} of {len(parts)}")
            for part in parts:
                self._add(part, depth + 1)
        else:
            self._note(type(value).__name__)

    def _add_tensor(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            self._note(f"{tensor.dtype} {tuple(tensor.shape)}")
            return
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        half = tensor.is_floating_point() and tensor.element_size() <= 2
        self._add_array((tensor.float() if half else tensor).numpy(), rounded=half)

    def _add_array(self, array: npt.NDArray[Any], *, rounded: bool = False) -> None:
        self._note(f"{array.dtype.kind} {array.shape}")
        kind, size = array.dtype.kind, array.size
        if kind not in "biufcmMSU" or not size:
            return
        data = np.ascontiguousarray(array)
        inexact = kind in "fc" or (array.dtype == np.uint8 and size > _SMALL)
        (self._bits if inexact else self._exact).update(data.tobytes())
        if inexact and len(self._near) < _MOST_NEAR:
            small = size <= _SMALL and not rounded and array.dtype != np.float16
            self._near.append(_outline(data.ravel(), _TOLERANCE_OF_SMALL if small else _TOLERANCE))

    def _note(self, value: object) -> None:
        self._exact.update(f"{type(value).__name__}:{value!r};".encode())


def alike(one: Plain, other: Plain) -> bool:
    """Return whether two likenesses belong to equal samples, up to rounding."""
    if one["exact"] != other["exact"] or len(one["near"]) != len(other["near"]):
        return False
    return all(map(_close, one["near"], other["near"]))


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    tolerance = max(one[0], other[0])
    return all(abs(a - b) <= tolerance for a, b in zip(one[1:], other[1:], strict=True))


def _outline(flat: npt.NDArray[Any], tolerance: float) -> list[float]:
    """Return the tolerance, then means of parts of an array that distinguish it from others."""
    if flat.dtype.kind == "c":
        flat = np.concatenate([flat.real, flat.imag])
    thinned = flat[:: max(1, flat.size // _MOST_NUMBERS)].astype(np.float64)
    numbers = np.nan_to_num(thinned, nan=0.0, posinf=0.0, neginf=0.0)
    means = [part.mean() for part in np.array_split(numbers, min(_PARTS, numbers.size))]
    if numbers.size > _SMALL:  # large parts of two noisy signals have equal means
        starts = np.linspace(0, numbers.size - _WINDOW, _PARTS).astype(int)
        means += [numbers[start : start + _WINDOW].mean() for start in starts]
    allowed = tolerance * float(np.sqrt(np.square(numbers).mean()))
    return [float(f"{number:.6g}") for number in (allowed + 1e-12, *means)]


def _stable(value: object) -> object:
    """Return a value without the parts that differ between machines with the same data."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, PurePath):
        return value.name
    if isinstance(value, str) and _PLACE.match(value):
        return re.split(r"[\\/]", value.partition("?")[0].rstrip("\\/"))[-1]
    return value


def _parts(value: object) -> list[Any]:
    """Return a container's items, in an order that is equal on all machines; else an empty list."""
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=str) for part in (str(key), value[key])]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, Sequence):
        if value and all(type(part) in (int, float) for part in value[:_LONGEST]):
            return [np.asarray(value)]
        return list(value)
    return []


def look(dataset: Any, seed: int, processes: int) -> Plain:
    """Return outlines of some samples on this rank, as JSON types; see `judge_data`."""
    # From a copy, so that loading does not change the data set's counters, caches and open files,
    # and worker processes inherit no open file.
    source = _copied(dataset)
    if source is None and processes:
        logger.debug("the ranks' data is not compared: the data set cannot be copied")
        return {}
    data = indexed(dataset if source is None else source)
    samples: Plain = {}
    try:
        if window_kind(dataset):
            return _look_ahead(data, seed)
        _look_at(data, _indices(dataset), seed, samples)
    except Exception as error:  # training raises it again, unless it came from loading too early
        logger.debug("the ranks' data is not compared any further: a sample failed", exc_info=error)
    if isinstance(data, ShardReader):
        data.release()
    return {"samples": samples, "made": _made(dataset)}


def _look_at(data: Any, indices: list[int], seed: int, samples: Plain) -> None:
    started_s = time.perf_counter()
    # With the samples' own seeds, as in training.
    seeds = item_seeds(seed, 0, np.array(indices))
    seeded = SeededDataset(data)
    for key in zip(indices, seeds.tolist(), strict=True):
        first = Likeness(seeded[key]).to_plain()
        if time.perf_counter() - started_s > _TOO_SLOW_S:
            return
        if Likeness(seeded[key]).to_plain() == first:
            samples[str(key[0])] = first
        else:
            logger.debug("sample %d differs when it is loaded again: not compared", key[0])
        if time.perf_counter() - started_s > _BUDGET_S:
            return


def _look_ahead(data: Any, seed: int) -> Plain:
    """Return outlines of the first samples of a stream, and whether it repeats them."""
    first, again = (
        [Likeness(sample).to_plain() for sample in first_samples(data, seed)] for _ in range(2)
    )
    if first != again:
        return {"changes": type(getattr(data, "source", data)).__name__}
    made = "part" if window_kind(data) == "stream" else ""
    return {"samples": {str(n): one for n, one in enumerate(first)}, "made": made}


def judge_data(shown: Sequence[Plain], topic: str) -> None:
    """Compare what all ranks have shown; raise `RanksDisagree` if most samples differ."""
    if changes := [mine["changes"] for mine in shown if mine.get("changes")]:
        raise ConfigError(
            f"the data of {topic} (a {changes[0]}) begins with other samples when it is read "
            "again, so the ranks cannot read the same samples. Draw random numbers from the global "
            "generators of torch, numpy or Python, which are seeded, or give its own generator a "
            "seed at the start of each epoch. A function must not keep a position: pass a "
            "sequential source as evenstride.Stream. check_data=False disables this check."
        )
    of_ranks = [mine.get("samples", {}) for mine in shown]
    common = [index for index in of_ranks[0] if all(index in samples for samples in of_ranks)]
    others: list[int] = []
    slightly: list[int] = []
    for rank, samples in enumerate(of_ranks):
        different = [i for i in common if not alike(of_ranks[0][i], samples[i])]
        # Most must differ: another version of a decoder changes a few.
        if 2 * len(different) > len(common):
            others.append(rank)
        elif any(samples[i] != of_ranks[0][i] for i in common):
            slightly.append(rank)
    if others:
        made = next((mine["made"] for mine in shown if mine["made"]), "")
        raise RanksDisagree(
            f"the ranks have different data in {topic}: sample {common[0]} on rank "
            f"{listed(others)} differs from that on rank 0. {_CAUSES[made]} If the samples are "
            "meant to differ, pass check_data=False."
        )
    if slightly:
        logger.warning(
            "a few samples of %s differ between rank %s and rank 0, or all differ slightly. "
            "Different versions of a decoder do that. Check that every rank has the same files "
            "and packages.",
            topic,
            listed(slightly),
        )


def _indices(dataset: Any) -> list[int]:
    """Return the samples to compare: the first of some shards, or some from the whole data set."""
    shards = lengths_of(dataset)
    if shards:
        ends = accumulate(shards)
        starts = [end - size for end, size in zip(ends, shards, strict=True) if size]
        return list(dict.fromkeys(starts[int(place * len(starts))] for place in _PLACES))
    length = dataset_length(dataset)
    return list(dict.fromkeys(int(place * length) for place in _PLACES))


def _made(dataset: Any) -> str:
    """Return how a data set was made out of another one, as far as it is visible."""
    for _ in range(_DEEPEST_WRAPPER):
        if isinstance(dataset, Subset):
            indices = [int(index) for index in dataset.indices[:_FEW]]
            return "part" if indices == sorted(indices) else "split"
        dataset = getattr(dataset, "dataset", None)
    return ""


class _CheckDeadline(Exception):
    pass


class _Sink(io.BytesIO):
    """Accepts bytes until a deadline."""

    def __init__(self) -> None:
        super().__init__()
        self._end_s = time.perf_counter() + _BUDGET_S

    def write(self, data: Any) -> int:
        if time.perf_counter() > self._end_s:
            raise _CheckDeadline
        return super().write(data)


class _Sharing(pickle.Pickler):
    """Pickles an object, but shares large parts that loading a sample does not change."""

    def __init__(self, sink: io.BytesIO) -> None:
        super().__init__(sink, protocol=pickle.HIGHEST_PROTOCOL)
        self.shared: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        long = type(obj) in _TABLES and len(obj) > _LONG
        if not (long or isinstance(obj, _SHARED) or type(obj).__module__.startswith("pyarrow")):
            return None
        self.shared.append(obj)
        return len(self.shared) - 1


_TABLES = (list, tuple, dict, str, bytes, bytearray)
_SHARED = (
    Tensor,
    np.ndarray,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
)


class _Shared(pickle.Unpickler):
    def __init__(self, data: bytes, shared: list[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._shared = shared

    def persistent_load(self, pid: int) -> Any:
        return self._shared[pid]


def _copied(dataset: Any) -> Any:
    """Return a copy that shares the data set's large tables; ``None`` if it cannot be copied."""
    sink = _Sink()
    pickler = _Sharing(sink)
    try:
        pickler.dump(dataset)
        return _Shared(sink.getvalue(), pickler.shared).load()
    except Exception as error:
        logger.debug("the data set cannot be copied", exc_info=error)
        return None
