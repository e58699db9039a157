"""What a rank's memory is read from, and which errors say that it ran out."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenstride.runtime.memory.memory_meter import (
    DeviceMemory,
    MemoryMeter,
    ProcessMemory,
    is_out_of_memory,
)

MB, GB = 10**6, 10**9
DEVICE = torch.device("cuda", 1)


class FakeAllocator:
    """A device of 24 GB of which another process has 6 and our context has 1."""

    def __init__(self) -> None:
        self.started, self.peak, self.reserved, self.part = True, 3 * GB, 5 * GB, 1.0
        self.asked: list[Any] = []

    def is_initialized(self) -> bool:
        return self.started

    def current_device(self) -> int:
        return 3

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        self.asked.append(device)
        return 17 * GB - self.reserved, 24 * GB

    def memory_reserved(self, device: torch.device) -> int:
        self.asked.append(device)
        return self.reserved

    def max_memory_allocated(self, device: torch.device) -> int:
        self.asked.append(device)
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.asked.append(device)
        self.peak = 1 * GB

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        self.asked.append(device)
        return self.part


def test_a_device_can_hold_its_reserved_and_its_free_memory() -> None:
    allocator = FakeAllocator()
    memory = DeviceMemory(DEVICE, allocator)

    assert memory.limit_bytes() == 17 * GB
    allocator.reserved = 9 * GB
    assert memory.limit_bytes() == 17 * GB
    assert set(allocator.asked) == {DEVICE}


def test_ranks_on_one_device_share_what_is_free() -> None:
    allocator = FakeAllocator()  # 5 GB are reserved by this rank, and 12 GB are free

    assert DeviceMemory(DEVICE, allocator, 2).limit_bytes() == 11 * GB


def test_the_users_own_limit_of_a_device_is_kept_where_it_can_be_read() -> None:
    allocator = FakeAllocator()
    allocator.part = 0.5
    older: Any = {name: getattr(allocator, name) for name in dir(FakeAllocator) if name[0] != "_"}
    del older["get_per_process_memory_fraction"]

    assert DeviceMemory(DEVICE, allocator).limit_bytes() == 12 * GB
    assert DeviceMemory(DEVICE, SimpleNamespace(**older)).limit_bytes() == 17 * GB


def test_a_devices_peak_is_reported_once() -> None:
    allocator = FakeAllocator()
    meter = MemoryMeter(source=DeviceMemory(DEVICE, allocator))
    assert allocator.peak == GB  # what was before is not ours to tell

    allocator.peak = 4 * GB

    assert [meter.peak_bytes(), meter.peak_bytes()] == [4 * GB, GB]
    allocator.peak = 0  # as where the caching allocator is switched off
    assert meter.peak_bytes() is None


def test_an_unused_device_is_not_started() -> None:
    allocator = FakeAllocator()
    allocator.started = False
    meter = MemoryMeter(source=DeviceMemory(DEVICE, allocator))

    assert (meter.limit_bytes, meter.peak_bytes()) == (None, None)
    assert allocator.asked == []
    assert allocator.peak == 3 * GB


@pytest.mark.parametrize(("name", "index"), [("cuda", 3), ("cuda:1", 1)])
def test_a_device_without_an_index_is_the_current_one_of_the_thread_that_asks(
    monkeypatch: pytest.MonkeyPatch, name: str, index: int
) -> None:
    allocator = FakeAllocator()
    monkeypatch.setattr(torch, "get_device_module", lambda _: allocator)

    assert MemoryMeter(torch.device(name)).limit_bytes == 17 * GB
    assert set(allocator.asked) == {torch.device("cuda", index)}


@pytest.mark.parametrize("name", ["meta", "cuda:99", "xpu", "mps"])
def test_where_a_device_cannot_be_read_nothing_is_known_and_nothing_raised(name: str) -> None:
    meter = MemoryMeter(torch.device(name))

    assert (meter.limit_bytes, meter.peak_bytes()) == (None, None)


@pytest.mark.gpu
def test_a_real_device_tells_its_peak_and_its_limit() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.ones(1, device="cuda")
    meter = MemoryMeter(torch.device("cuda"))
    before = torch.cuda.memory_allocated()

    torch.ones(50_000_000, device="cuda")
    torch.cuda.synchronize()
    peak, limit = meter.peak_bytes(), meter.limit_bytes

    assert peak is not None
    assert limit is not None
    assert abs(peak - before - 200 * MB) < 20 * MB
    again = meter.peak_bytes()
    assert again is None or again < 100 * MB
    assert peak < limit <= torch.cuda.mem_get_info()[1]


class FakeProcess:
    """A process's folder whose marks cannot be reset, and the machine's control groups."""

    def __init__(self, folder: Path) -> None:
        self.process, self.groups = folder / "self", folder / "groups"
        (self.process / "clear_refs").mkdir(parents=True)  # so that it cannot be written
        self.holds(1000)

    def holds(self, peak_mb: int, now_mb: int = 1000) -> None:
        kb = {"VmPeak": 8 * peak_mb, "VmSize": 8 * now_mb, "VmHWM": peak_mb, "VmRSS": now_mb}
        text = "".join(f"{name}:\t{mb * 1000} kB\n" for name, mb in kb.items())
        (self.process / "status").write_text(f"Name:\tpython\n{text}Threads:\t3\n")

    def group(self, name: str, **files: object) -> None:
        folder = self.groups / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, value in files.items():
            (folder / file.replace("__", ".")).write_text(f"{value}\n")

    def member_of(self, line: str) -> None:
        (self.process / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")

    def memory(
        self, neighbours: int = 1, address_space_bytes: int | None = None, free: int = 64 * GB
    ) -> ProcessMemory:
        return ProcessMemory(
            neighbours, address_space_bytes, self.process, self.groups, lambda: free
        )


@pytest.fixture
def fake(tmp_path: Path) -> FakeProcess:
    return FakeProcess(tmp_path)


HELD = 1000 * 1000 * 1024


def test_free_memory_is_shared_among_the_ranks_of_a_machine(fake: FakeProcess) -> None:
    assert fake.memory(neighbours=4).limit_bytes() == HELD + 16 * GB
    assert fake.memory(neighbours=4, free=-1).limit_bytes() == HELD


def test_a_limit_of_a_version_1_group_leaves_the_unused_page_cache(fake: FakeProcess) -> None:
    fake.member_of("4:cpu,memory:/mine/inner")
    fake.group("memory", memory__limit_in_bytes=2**63 - 4096)  # no limit; its use is not read
    fake.group("memory/mine", memory__limit_in_bytes=12 * GB, memory__usage_in_bytes=8 * GB)
    fake.group("memory/mine", memory__stat=f"inactive_file 7\ntotal_inactive_file {2 * GB}")

    assert fake.memory(neighbours=2).limit_bytes() == HELD + 3 * GB


def test_a_limit_of_a_second_version_group_is_the_least_of_those_above(fake: FakeProcess) -> None:
    fake.member_of("0::/mine/inner")
    for name, limit in (("", "max"), ("mine", 9 * GB), ("mine/inner", 12 * GB)):
        stat = f"inactive_file {GB}"
        fake.group(name, memory__max=limit, memory__current=8 * GB, memory__stat=stat)
    memory = fake.memory()

    assert memory.limit_bytes() == HELD + 2 * GB
    fake.group("mine", memory__max="max")  # lifted meanwhile
    assert memory.limit_bytes() == HELD + 5 * GB
    fake.group("mine/inner", memory__max=12 * GB, memory__current=0)  # charged to others
    assert memory.limit_bytes() == 12 * GB


def test_a_group_that_is_not_visible_is_that_of_the_container(fake: FakeProcess) -> None:
    fake.member_of("0::/docker/0123")
    fake.group("", memory__max=4 * GB, memory__current=2 * GB, memory__stat="file 0")
    fake.group("..", memory__max=GB)  # outside of what is mounted

    assert fake.memory().limit_bytes() == HELD + 2 * GB


@pytest.mark.parametrize("line", ["nonsense", "0::/../../etc", "3:cpu:/mine", "5:memory:/"])
def test_groups_that_make_no_sense_limit_nothing(fake: FakeProcess, line: str) -> None:
    fake.member_of(line)
    fake.group("", memory__max="?", memory__current=GB)

    assert fake.memory().limit_bytes() == HELD + 64 * GB


def test_a_limited_address_space_is_what_counts(fake: FakeProcess) -> None:
    memory = fake.memory(address_space_bytes=20 * GB)
    fake.holds(1500)

    assert memory.limit_bytes() == 20 * GB
    assert memory.peak_bytes() == 8 * 1500 * 1000 * 1024
    assert fake.memory(address_space_bytes=99 * GB, free=GB).limit_bytes() == 8 * HELD + GB


def test_a_mark_that_cannot_be_reset_is_reported_when_it_rises(fake: FakeProcess) -> None:
    memory = fake.memory()
    results = []

    for peak_mb in (1000, 1010, 1020, 1030, 1300, 1300):
        fake.holds(peak_mb)
        peak = memory.peak_bytes()
        results.append(None if peak is None else peak // 1024_000)

    # 1 % more is variation of retained memory; two rises of 1 % are reported.
    assert results == [None, None, 1020, None, 1300, None]


def test_where_the_kernel_has_no_such_files_nothing_is_known(fake: FakeProcess) -> None:
    memory = fake.memory()
    (fake.process / "status").write_text("Name:\tpython\n")
    meter = MemoryMeter(source=memory)

    assert (meter.limit_bytes, meter.peak_bytes()) == (None, None)
    with pytest.raises(FileNotFoundError):
        ProcessMemory(process=fake.process / "missing")


CHILD = """
import json, sys
import torch
from evenstride.runtime.memory.memory_meter import MemoryMeter, is_out_of_memory

torch.set_num_threads(1)  # a thread's stack and heap are address space too

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

def limited(more_bytes):
    import resource
    limit = status("VmSize") + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return limit

def outcome(call):
    try:
        call()
    except BaseException as error:
        return [type(error).__name__, is_out_of_memory(error)]

"""


def _child(script: str) -> Any:
    command = [sys.executable, "-c", CHILD + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the files of Linux")


@linux
def test_a_process_reports_its_peak_and_starts_again() -> None:
    base, first, silent, second, limit = _child(
        """
meter = MemoryMeter(torch.device("cpu"))
base = status("VmRSS")
torch.ones(50_000_000)
first, silent = meter.peak_bytes(), meter.peak_bytes()
torch.ones(25_000_000)
print(json.dumps([base, first, silent, meter.peak_bytes(), meter.limit_bytes]))
"""
    )

    assert abs(first - base - 200 * MB) < 20 * MB
    assert silent is None
    assert abs(second - base - 100 * MB) < 10 * MB
    assert limit > base


@linux
def test_a_limited_address_space_is_seen_and_its_errors_are_known() -> None:
    before, allowed, limit, first, silent, *outcomes = _child(
        """
allowed = limited(1_000_000_000)
meter = MemoryMeter(torch.device("cpu"))
before = status("VmPeak")
torch.ones(50_000_000 + (before - status("VmSize")) // 4)

results = [before, allowed, meter.limit_bytes, meter.peak_bytes(), meter.peak_bytes()]
a = torch.ones(4000, 4000)
results.append(outcome(lambda: torch.empty(2**40)))
results.append(outcome(lambda: torch.nn.Conv2d(1, 4, 3)(a.expand(64, 1, -1, -1))))
results.append(outcome(lambda: [a @ a for a in [a.repeat(3, 3)]]))
results.append(outcome(lambda: torch.empty(1).expand(200_000_000).unbind()))
results.append(outcome(lambda: bytes(4_000_000_000)))
results.append(outcome(lambda: __import__("numpy").ones(10**9)))
results.append(outcome(lambda: __import__("mmap").mmap(-1, 4_000_000_000)))
results.append(outcome(lambda: a @ torch.ones(3)))
print(json.dumps(results))
"""
    )

    assert limit == allowed
    assert abs(first - before - 200 * MB) < 20 * MB
    assert silent is None
    *memory, other = outcomes
    names = [*["RuntimeError"] * 4, "MemoryError", "MemoryError", "OSError"]
    assert memory == [[name, True] for name in names]
    assert other == ["RuntimeError", False]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
                     "allocate memory: you tried to allocate 8589934592 bytes."),
        RuntimeError("[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("NCCL error: ncclUnhandledCudaError: Cuda failure 2 'out of memory'"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("Caught RuntimeError in DataLoader worker process 0.\n... unable to mmap "
                     "256000000 bytes from file </torch_1_2_0>: Cannot allocate memory (12)\n"),
    ],
    ids=lambda error: str(error)[:40] or "MemoryError",
)  # fmt: skip
def test_errors_that_say_that_memory_ran_out(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed "
                     "in a non-contiguous input."),
        RuntimeError("could not create a primitive"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("DataLoader worker is killed by signal: Bus error. It is possible that "
                     "dataloader's workers are out of shared memory."),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)"),
        RuntimeError("can't start new thread"),
        ValueError("out of memory"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: str(error)[:40] or "KeyboardInterrupt",
)  # fmt: skip
def test_errors_that_say_something_else(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_an_error_on_the_way_to_another_counts_unless_it_is_hidden() -> None:
    caused, during, hidden = (RuntimeError("failed") for _ in range(3))
    caused.__cause__ = during.__context__ = hidden.__context__ = MemoryError()
    hidden.__suppress_context__ = True  # raise ... from None

    assert is_out_of_memory(caused)
    assert is_out_of_memory(during)
    assert not is_out_of_memory(hidden)


def test_one_error_of_a_group_is_enough_and_a_circle_of_errors_ends() -> None:
    group = ExceptionGroup("ranks", [ValueError("x"), ExceptionGroup("more", [MemoryError()])])
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first

    assert is_out_of_memory(group)
    assert not is_out_of_memory(first)
