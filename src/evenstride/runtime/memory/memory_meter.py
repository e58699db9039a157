"""Limit and peak of this rank's memory, and whether an error means that memory ran out.

A peak is reported only if it certainly belongs to the time since the last call: *exact or silent*.
An older level can persist: the C library keeps freed memory, and the kernel's mark may not allow a
reset. Such a level would be attributed to a later share. Memory would then seem not to depend on
the share.
"""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import psutil
import torch

from evenstride.core.time_model.observation import PeakMemory
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.loss.batch_in_hand import BatchInHand

# Errors when a system lacks some file, call or device.
_UNREADABLE = (
    *(OSError, ValueError, LookupError, AttributeError, AssertionError, RuntimeError),
    psutil.Error,
)

# Steps until the optimizer has created its states and one step has run with them.
_WARM_STEPS = 2
# A mark that rose by less than this part is the old one: retained memory varies a little.
_JITTER = 1 / 64

# Control groups of version 1 without a limit report one near 2**63.
_NO_LIMIT_BYTES = 2**62

_PROCESSOR = torch.device("cpu")

# Texts of errors of torch, CUDA's libraries and C++ that have no class of their own.
_OUT_OF_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "status_alloc_failed",  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuFFT
    "std::bad_alloc",
    "cufft_alloc_failed",
)


class Source(Protocol):
    """What a `MemoryMeter` reads; may raise if it cannot be read."""

    def limit_bytes(self) -> int:
        """Return the most memory that this rank can have at this moment."""

    def peak_bytes(self) -> int | None:
        """Return the highest level since the last call, and start a new measurement."""


class MemoryMeter:
    """Limit and peak of the memory of this rank's device; ``None`` if unknown.

    Created on the training thread, then read by one control thread. It never raises, never waits
    for the device and never starts one. Reading resets the marks behind
    `torch.cuda.max_memory_allocated` and the kernel's ``VmHWM``: other readers of these marks see
    peaks since our last reading. A reading costs about 0.5 ms on a CPU and up to 3 ms more in a
    limited control group. On an accelerator it costs a few calls of the allocator.
    """

    def __init__(
        self,
        device: torch.device = _PROCESSOR,
        # Ranks that share the free memory evenly, including this one: all of a machine's memory, or
        # those on the same accelerator.
        neighbours: int = 1,
        source: Source | None = None,  # to read instead, in tests
    ) -> None:
        self._source: Source | None = source
        if source is None:
            try:
                self._source = _source_for(device, max(neighbours, 1))
            except _UNREADABLE:
                self._source = None

    @property
    def limit_bytes(self) -> int | None:
        """The most memory this rank can have now, in bytes; it changes with other processes."""
        try:
            return None if self._source is None else self._source.limit_bytes()
        except _UNREADABLE:
            return None

    def peak_bytes(self) -> int | None:
        """Return the peak since the last call in bytes, and start a new measurement.

        ``None`` means that nothing new is known, not that no memory was used. The peak belongs to
        the largest share computed since then. It counts the memory that `limit_bytes` limits.
        """
        try:
            return None if self._source is None else self._source.peak_bytes()
        except _UNREADABLE:
            return None


def _source_for(device: torch.device, neighbours: int) -> Source:
    if device.type == "cpu":
        return ProcessMemory(neighbours, address_space_bytes=_address_space_limit_bytes())
    allocator = torch.get_device_module(device)
    if cast("int | None", device.index) is None:  # each thread has its own current device
        device = torch.device(device.type, allocator.current_device())
    return DeviceMemory(device, allocator, neighbours)


class DeviceMemory:
    """Memory of an accelerator with a caching allocator, such as ``torch.cuda``.

    The peak is that of tensors, not that of memory reserved by the allocator. Reserved memory stays
    when shares shrink, and the allocator releases cached blocks before it fails. Blocks that are
    partly in use cannot be released and are not counted; keep a fraction of the limit free for
    them. The limit is what the allocator has reserved plus this rank's part of what is free. It
    leaves out memory of other processes, of the context and of communication.
    """

    def __init__(self, device: torch.device, allocator: Any, neighbours: int = 1) -> None:
        self._device, self._allocator, self._neighbours = device, allocator, neighbours
        if allocator.is_initialized():
            allocator.reset_peak_memory_stats(device)

    def limit_bytes(self) -> int:
        self._require_started()
        free_bytes, total_bytes = self._allocator.mem_get_info(self._device)
        fair = int(free_bytes) // self._neighbours
        limit = fair + int(self._allocator.memory_reserved(self._device))
        # The user's own limit can be read with torch 2.7 or later.
        fraction_of = getattr(self._allocator, "get_per_process_memory_fraction", None)
        if fraction_of is None:
            return limit
        return min(limit, int(fraction_of(self._device) * total_bytes))

    def peak_bytes(self) -> int | None:
        """Return the most bytes in tensors; ``None`` if the allocator does not count them."""
        self._require_started()
        peak = int(self._allocator.max_memory_allocated(self._device))
        # Memory allocated and freed between these two lines is missed; the next step shows it.
        self._allocator.reset_peak_memory_stats(self._device)
        return peak or None

    def _require_started(self) -> None:
        # Reading the memory of a device would start it, which takes hundreds of megabytes.
        if not self._allocator.is_initialized():
            raise RuntimeError("the device is not in use yet")


class ProcessMemory:
    """Memory of this process as Linux counts it: resident, or the address space if that is limited.

    Resident pages include those of mapped files, although the kernel could reclaim them. So a
    mapped data set counts as needed memory. Memory of loader processes does not count as needed,
    only as not free.
    """

    def __init__(
        self,
        neighbours: int = 1,
        address_space_bytes: int | None = None,
        process: Path = Path("/proc/self"),
        groups: Path = Path("/sys/fs/cgroup"),
        available_bytes: Callable[[], int] = lambda: int(psutil.virtual_memory().available),
    ) -> None:
        self._neighbours, self._address_space_bytes = neighbours, address_space_bytes
        self._process, self._available_bytes = process, available_bytes
        # Searched once, because reading all groups takes a millisecond.
        self._groups = tuple(_limited_groups(process / "cgroup", groups))
        # Under `ulimit -v` an allocation fails at the address space, long before pages run short.
        limited = address_space_bytes is not None
        self._now, self._mark = ("VmSize", "VmPeak") if limited else ("VmRSS", "VmHWM")
        self._base_bytes = self._reported_bytes = self._reset()

    def limit_bytes(self) -> int:
        """Return the memory in use plus this process's part of the free memory, within limits."""
        free, most = [self._available_bytes()], [self._address_space_bytes]
        for group in self._groups:
            limit = group.limit_bytes()  # may have been removed in the meantime
            if limit is not None:
                free.append(group.room_bytes(limit))
                most.append(None if self._now == "VmSize" else limit)
        held = self._status_bytes(self._now)
        fair = held + max(min(free), 0) // self._neighbours
        # Other groups may be charged for pages of libraries, so the room alone may be too large.
        return min([fair, *(limit for limit in most if limit is not None)])

    def peak_bytes(self) -> int | None:
        """Return the peak if it is of this time: it rose, or it exceeds all reported peaks."""
        peak = self._status_bytes(self._mark)
        rose = peak - min(self._base_bytes, self._reported_bytes) > peak * _JITTER
        self._base_bytes = self._reset()
        if not rose:
            return None
        self._reported_bytes = max(self._reported_bytes, peak)
        return peak

    def _reset(self) -> int:
        """Reset the mark if the kernel allows it; return the level from which it rises again."""
        if self._mark == "VmHWM":
            # If a reset is not allowed, the mark stays and is reported again only when it rises.
            with contextlib.suppress(OSError):
                (self._process / "clear_refs").write_text("5")  # resets this mark only
        return self._status_bytes(self._mark)

    def _status_bytes(self, field: str) -> int:
        for line in (self._process / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024
        raise LookupError(f"no {field} in {self._process / 'status'}")


def _address_space_limit_bytes() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True, slots=True)
class _MemoryCgroup:
    folder: Path
    limit: str
    usage: str

    def limit_bytes(self) -> int | None:
        """Return its limit in bytes, if it has a visible one."""
        try:
            limit = int((self.folder / self.limit).read_text())
        except (OSError, ValueError):  # "max", or the group does not exist
            return None
        return limit if limit < _NO_LIMIT_BYTES else None

    def room_bytes(self, limit_bytes: int) -> int:
        """Return the bytes that it can still take; the unused page cache counts as free."""
        used = int((self.folder / self.usage).read_text())
        lines = (self.folder / "memory.stat").read_text().splitlines()
        counts = dict(line.split() for line in lines)
        cached = counts.get("total_inactive_file", counts.get("inactive_file", "0"))
        return limit_bytes - used + int(cached)


def _limited_groups(membership: Path, root: Path) -> Iterator[_MemoryCgroup]:
    """Yield the control groups that limit this process, innermost first; outer ones count, too."""
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif path and not controllers:
            top, names = root, ("memory.max", "memory.current")
        else:
            continue
        # In a container the path may be invisible; the mounted root is then the process's group.
        inside = top / path.lstrip("/")
        for folder in (inside, *inside.parents):
            group = _MemoryCgroup(folder, *names)
            if folder.is_relative_to(top) and group.limit_bytes() is not None:
                yield group


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory of the device or of the machine ran out.

    True for the specific classes (``torch.OutOfMemoryError``, ``MemoryError``, ``OSError`` with
    ``ENOMEM``) and for a ``RuntimeError`` with a known text. Errors that this one was raised from,
    or while handling, count too, unless hidden by ``raise ... from None``. For example, saving a
    checkpoint replaces a ``MemoryError`` by an error about a position in a file.

    Not recognised: oneDNN's "could not create a primitive", which unsupported arguments also
    cause; a process that the kernel killed; exhausted shared memory or threads.
    """
    return any(_says_so(each) for each in _with_its_causes(error))


def _with_its_causes(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, BaseExceptionGroup):
            waiting.extend(each.exceptions)
        before = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
        if before is not None:
            waiting.append(before)


def _says_so(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(words in text for words in _OUT_OF_MEMORY)


class PeakReport:
    """Pairs the peak memory since the last exchange with the largest batch in that time."""

    def __init__(
        self,
        batch: BatchInHand,
        limits: MicroBatchLimits,
        progress: CommittedPosition,
        rank: int,
        neighbours: int,
    ) -> None:
        self._batch, self._limits, self._progress = batch, limits, progress
        self._rank, self._neighbours = rank, neighbours
        self._meter: MemoryMeter | None = None
        self._evaluated = False  # since the last call of `take`

    def note_evaluation(self) -> None:
        """Note that an evaluation runs, whose memory is not that of a step."""
        self._evaluated = True

    def watch(self, device: torch.device, sharing: int = 1) -> None:
        """Measure the memory of the first watched model's device, on which ``sharing`` ranks are.

        All ranks of a machine share its memory, if the device is a CPU.
        """
        if self._meter is None:
            self._meter = MemoryMeter(device, self._neighbours if device.type == "cpu" else sharing)

    def take(self) -> PeakMemory | None:
        """Return the peak since the last call, if it is known (control thread)."""
        samples = self._batch.largest()
        # Not if the script limits the size of micro-batches. Before a model is watched, its device
        # is unknown.
        if self._meter is None or not self._limits.follows_share:
            return None
        peak_bytes = self._meter.peak_bytes()  # starts a new measurement, even if not used
        evaluated, self._evaluated = self._evaluated, False
        if self._progress.step < _WARM_STEPS or evaluated:
            return None  # the peak of something else than a step
        share = max(samples, 1) * (self._limits.number or 1)
        return PeakMemory(self._rank, share, peak_bytes, self._meter.limit_bytes)
