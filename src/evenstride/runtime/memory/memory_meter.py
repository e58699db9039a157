"""How much memory this rank may have and has had, and whether an error says that it ran out.

A peak is told only where it is known to belong to the time since the last call: *exact or silent*.
A level that was merely kept from before, because the C library holds on to freed memory or because
the kernel's mark cannot be reset, would be taken for the need of whatever share came after, and
make memory look as if it did not depend on the share.
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
from torch import nn

from evenstride.core.time_model.observation import PeakMemory
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.loss.batch_in_hand import BatchInHand

# What reading a system that lacks some file, call or device may raise.
_UNREADABLE = (
    *(OSError, ValueError, LookupError, AttributeError, AssertionError, RuntimeError),
    psutil.Error,
)

# Steps until the optimizer has made its states, and a step was held beside them.
_WARM_STEPS = 2
# A mark that rose by less than this part was there before: kept memory jitters a little.
_JITTER = 1 / 64

# First-version groups without a limit have one near 2**63.
_NO_LIMIT_BYTES = 2**62

# Texts of torch, CUDA's libraries and C++, of errors that have no class of their own.
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
    """What a `MemoryMeter` reads; may raise where it cannot."""

    def limit_bytes(self) -> int:
        """Return the most memory this rank can have at this moment."""

    def peak_bytes(self) -> int | None:
        """Return the highest level since the last call, and begin anew."""


class MemoryMeter:
    """What this rank's device can hold and has held; ``None`` where that cannot be known.

    Made on the training thread, then read by one control thread. It never raises, never waits for
    the device and never starts one. Reading resets the marks that `torch.cuda.max_memory_allocated`
    or the kernel's ``VmHWM`` show, so who reads those as well sees peaks since our last reading. It
    costs about 0.5 ms on a CPU, up to 3 ms more in a limited control group, and a few calls of its
    allocator on an accelerator.
    """

    def __init__(
        self,
        device: torch.device | None = None,  # the current one, if it is not told
        # Processes of the job here, with this one. What is free in the machine's memory is shared
        # among them evenly; that of an accelerator is not shared.
        neighbours: int = 1,
        source: Source | None = None,  # to read instead, for tests
    ) -> None:
        self._source: Source | None = source
        if source is None:
            try:
                self._source = _source_for(device, max(neighbours, 1))
            except _UNREADABLE:
                self._source = None

    @property
    def limit_bytes(self) -> int | None:
        """The most memory this rank can have, as far as it is free now; other processes move it."""
        try:
            return None if self._source is None else self._source.limit_bytes()
        except _UNREADABLE:
            return None

    def peak_bytes(self) -> int | None:
        """Return the most held since the last call, and begin anew.

        ``None`` means that nothing new is known, not that nothing was held. The peak belongs to the
        largest share computed since then. It counts what `limit_bytes` limits.
        """
        try:
            return None if self._source is None else self._source.peak_bytes()
        except _UNREADABLE:
            return None


def _source_for(device: torch.device | None, neighbours: int) -> Source:
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        return ProcessMemory(neighbours, address_space_bytes=_address_space_limit_bytes())
    allocator = torch.get_device_module(device)
    if cast("int | None", device.index) is None:  # the current device is each thread's own
        device = torch.device(device.type, allocator.current_device())
    return DeviceMemory(device, allocator)


class DeviceMemory:
    """Memory of an accelerator with a caching allocator, ``torch.cuda`` or alike.

    The peak is that of what tensors took, not of what the allocator reserved: reserved memory stays
    when shares shrink, and the allocator gives cached blocks back before it fails. What it cannot
    give back, because a block is in part in use, is not counted; a fraction below 1 of the limit is
    for that. The limit is what the allocator has reserved and what is free, which leaves out what
    other processes, the context and communication hold.
    """

    def __init__(self, device: torch.device, allocator: Any) -> None:
        self._device, self._allocator = device, allocator
        if allocator.is_initialized():
            allocator.reset_peak_memory_stats(device)

    def limit_bytes(self) -> int:
        self._require_started()
        free_bytes, total_bytes = self._allocator.mem_get_info(self._device)
        limit = int(free_bytes) + int(self._allocator.memory_reserved(self._device))
        # The user's own limit can be read in torch 2.7 and later.
        fraction_of = getattr(self._allocator, "get_per_process_memory_fraction", None)
        if fraction_of is None:
            return limit
        return min(limit, int(fraction_of(self._device) * total_bytes))

    def peak_bytes(self) -> int | None:
        """Return the most bytes in tensors; ``None`` where the allocator does not count."""
        self._require_started()
        peak = int(self._allocator.max_memory_allocated(self._device))
        # What is allocated and freed between these two lines is missed; the next step shows it.
        self._allocator.reset_peak_memory_stats(self._device)
        return peak or None

    def _require_started(self) -> None:
        # Asking for its memory would start a device, which takes hundreds of megabytes.
        if not self._allocator.is_initialized():
            raise RuntimeError("the device is not in use yet")


class ProcessMemory:
    """Memory of this process as Linux counts it: resident, or its address space if that is limited.

    Resident pages include those of mapped files, which the kernel could take back, so a data set
    that is mapped counts as needed. Processes of a data loader do not count as needed, only as not
    free.
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
        # Looked for once: going through all of them takes a millisecond.
        self._groups = tuple(_limited_groups(process / "cgroup", groups))
        # Under `ulimit -v` an allocation fails by the address space, long before pages run short.
        limited = address_space_bytes is not None
        self._now, self._mark = ("VmSize", "VmPeak") if limited else ("VmRSS", "VmHWM")
        self._base_bytes = self._told_bytes = self._begin_anew()

    def limit_bytes(self) -> int:
        """Return what is held now and this process's part of what is free, within its limits."""
        free, most = [self._available_bytes()], [self._address_space_bytes]
        for group in self._groups:
            limit = group.limit_bytes()  # may have been lifted meanwhile
            if limit is not None:
                free.append(group.room_bytes(limit))
                most.append(None if self._now == "VmSize" else limit)
        held = self._status_bytes(self._now)
        fair = held + max(min(free), 0) // self._neighbours
        # Pages of libraries may be charged to other groups, so room alone could promise too much.
        return min([fair, *(limit for limit in most if limit is not None)])

    def peak_bytes(self) -> int | None:
        """Return the peak if this time reached it: it rose, or is higher than any told before."""
        peak = self._status_bytes(self._mark)
        rose = peak - min(self._base_bytes, self._told_bytes) > peak * _JITTER
        self._base_bytes = self._begin_anew()
        if not rose:
            return None
        self._told_bytes = max(self._told_bytes, peak)
        return peak

    def _begin_anew(self) -> int:
        """Reset the mark if the kernel lets us; return the level that the next peak rises from."""
        if self._mark == "VmHWM":
            # Where that is not allowed, the mark stays, and is told again only when it rises.
            with contextlib.suppress(OSError):
                (self._process / "clear_refs").write_text("5")  # this mark and nothing else
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
    """A control group, v1 or v2, by its files."""

    folder: Path
    limit: str
    usage: str

    def limit_bytes(self) -> int | None:
        """Return its limit, if it has one that can be seen."""
        try:
            limit = int((self.folder / self.limit).read_text())
        except (OSError, ValueError):  # "max", or no such group here
            return None
        return limit if limit < _NO_LIMIT_BYTES else None

    def room_bytes(self, limit_bytes: int) -> int:
        """Return how much it can still take; the page cache nobody uses is given back first."""
        used = int((self.folder / self.usage).read_text())
        lines = (self.folder / "memory.stat").read_text().splitlines()
        counts = dict(line.split() for line in lines)
        cached = counts.get("total_inactive_file", counts.get("inactive_file", "0"))
        return limit_bytes - used + int(cached)


def _limited_groups(membership: Path, root: Path) -> Iterator[_MemoryCgroup]:
    """Yield the control groups that limit this process, from inside out: those above count too."""
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif path and not controllers:
            top, names = root, ("memory.max", "memory.current")
        else:
            continue
        # In a container the path may not be visible, but what is mounted as the root is its group.
        inside = top / path.lstrip("/")
        for folder in (inside, *inside.parents):
            group = _MemoryCgroup(folder, *names)
            if folder.is_relative_to(top) and group.limit_bytes() is not None:
                yield group


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, of the device or of the machine, on the way to this error.

    True for the classes that say so (``torch.OutOfMemoryError``, ``MemoryError``, ``OSError`` with
    ``ENOMEM``) and for a ``RuntimeError`` whose text does. Errors that this one was raised from, or
    during whose handling it was raised, count too, unless hidden by ``raise ... from None``: saving
    a checkpoint replaces a ``MemoryError`` by one about a position in a file.

    Not recognised: oneDNN's "could not create a primitive", which unsupported arguments cause as
    well; a process that the kernel killed; shared memory or threads that ran out.
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
    """Pairs the most memory held since the last exchange with the largest batch held meanwhile."""

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

    def watch(self, model: nn.Module) -> None:
        if self._meter is None:
            devices = (p.device for p in model.parameters())
            self._meter = MemoryMeter(next(devices, torch.device("cpu")), self._neighbours)

    def take(self) -> PeakMemory | None:
        """Return what was held since the last call, if that is known (control thread)."""
        samples = self._batch.largest()
        # Only where a share is held at once: micro-batches are as large as the user says. Until a
        # model is watched nothing is known of its device.
        if self._meter is None or self._limits.micro:
            return None
        peak_bytes = self._meter.peak_bytes()  # which begins anew, whatever becomes of it
        evaluated, self._evaluated = self._evaluated, False
        if self._progress.step < _WARM_STEPS or evaluated:
            return None  # a peak of something else
        return PeakMemory(self._rank, max(samples, 1), peak_bytes, self._meter.limit_bytes)
