"""Compare evenstride's checkpoint writer with torch's file-system writer (DCP) on one state.

    python benchmarks/checkpoint_writers.py [--megabytes 256] [--ranks 2] [--rounds 5] [--json]

Every rank holds the same tensors, as under DDP: an embedding with half of the bytes, and layers of
four matrices and four vectors. DCP deduplicates them. With ``async_save``, a thread writes the
staged copy. For each writer, the benchmark prints medians over the rounds after a first save:

* blocked: time for which the call blocks the training thread, on the slowest rank
* all: time until the checkpoint is complete
* memory: largest increase of the resident memory of a process during its saves
* balance: largest number of bytes that a rank wrote, divided by the mean

Then one process reads damaged checkpoints: with one bit flipped in the largest file, with that file
truncated, and with a metadata file that runs code when it is unpickled.
"""

from __future__ import annotations

import argparse
import json
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from evenstride.runtime.checkpoint.format.manifest import (
    FORMAT,
    Manifest,
    Name,
    check_file,
    parse_name,
    read_manifest,
)
from evenstride.runtime.checkpoint.format.storage import PatientReader, open_storage
from evenstride.runtime.checkpoint.restore.checkpoint_reader import Reader
from evenstride.runtime.checkpoint.restore.saved_state import Sources
from evenstride.runtime.checkpoint.save.checkpoint_writer import Writer, write
from evenstride.runtime.checkpoint.save.save_job import SaveJob, Staging, pieces_of
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.testing import run_ranks

WRITERS = ("ours", "dcp", "dcp async")
GENERATION = "0" * 12
POSITION: dict[str, Any] = CommittedPosition(seed=0, global_batch=1).save()


def model_state(size_bytes: float) -> dict[str, Tensor]:
    """Return tensors of about ``size_bytes``: an embedding with half of them, and eight layers."""
    width = int((size_bytes / 2 / 8 / 4 / 4) ** 0.5)
    rows = int(size_bytes / 2 / 4 / width)
    state = {"embedding": torch.randn(rows, width)}
    for layer in range(8):
        state |= {f"layer.{layer}.matrix.{n}": torch.randn(width, width) for n in range(4)}
        state |= {f"layer.{layer}.vector.{n}": torch.randn(width) for n in range(4)}
    return state


class Ours:
    """evenstride's writer: copies the tensors of a rank, then writes them in a thread."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._storage, self._staging = open_storage(str(folder)), Staging()
        self._rank, self._world_size = rank, world_size
        self._thread = ThreadPoolExecutor(1)
        self._group: Any = dist.new_group(backend="gloo") if world_size > 1 else None

    def save(self, state: dict[str, Tensor], number: int) -> Callable[[], object]:
        """Start a save. Return a function that waits for its end."""
        name = Name(number, GENERATION, number)
        pieces = pieces_of(Sources(state, {}), self._rank, self._world_size)
        staged = self._staging.copy(pieces)
        about = Manifest(FORMAT, number, 0.0, self._world_size, {}, POSITION, {}, {}, {})
        job = SaveJob(name, self._rank, staged, {}, "", about)
        writer = Writer(self._storage, job, threading.Event())
        return self._thread.submit(write, job, writer, self._group).result


class Dcp:
    """torch's file-system writer, in the training thread or with ``async_save``."""

    def __init__(self, folder: Path, asynchronous: bool) -> None:
        self._folder = folder
        # Stage in the calling thread: the copy must be complete before the next step.
        options = StagingOptions(False, False, False, False)
        self._stager = DefaultStager(options) if asynchronous else None
        self._group = dist.new_group(backend="gloo")

    def save(self, state: dict[str, Tensor], number: int) -> Callable[[], object]:
        """Start a save. Return a function that waits for its end."""
        writer = FileSystemWriter(self._folder / str(number))
        how: Any = {
            "storage_writer": writer,
            "planner": DefaultSavePlanner(dedup_save_to_lowest_rank=False),
            "process_group": self._group,
        }
        if self._stager is None:
            save(dict(state), **how)
            return lambda: None
        answer: Any = async_save(dict(state), async_stager=self._stager, **how)
        return getattr(answer, "upload_completion", answer).result  # type: ignore[no-any-return]


@dataclass
class Peak:
    """Largest increase of resident memory, measured by a thread every 2 ms."""

    most_bytes: int = 0

    def __enter__(self) -> Peak:
        self._process, self._end = psutil.Process(), threading.Event()
        self._before_bytes = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.002):
            above_bytes = self._process.memory_info().rss - self._before_bytes
            self.most_bytes = max(self.most_bytes, above_bytes)


def measure(rank: int, writer: str, folder: str, megabytes: float, rounds: int) -> dict[str, Any]:
    """Return the figures of a writer on this rank. A collective call."""
    torch.manual_seed(0)
    state, world_size = model_state(megabytes * 1e6), dist.get_world_size()
    one = Ours(Path(folder), rank, world_size) if writer == "ours" else None
    saver = one or Dcp(Path(folder), asynchronous=writer == "dcp async")
    blocked_s, whole_s = [], []
    with Peak() as peak:
        for number in range(1, rounds + 2):
            dist.barrier()
            began_s = time.perf_counter()
            wait = saver.save(state, number)
            blocked_s.append(time.perf_counter() - began_s)
            wait()
            whole_s.append(time.perf_counter() - began_s)
    return {
        "blocked_s": median(blocked_s[1:]),
        "all_s": median(whole_s[1:]),
        "memory_bytes": peak.most_bytes,
    }


def sizes_bytes(folder: Path) -> list[int]:
    """Return the size of each rank's tensor file in a checkpoint of either writer."""
    names = ("*.distcp", "tensors-*.bin")
    return [file.stat().st_size for pattern in names for file in folder.glob(pattern)]


def restored(folder: Path, saved: dict[str, Tensor]) -> str:
    """Load a checkpoint in one process. Return ``equal``, ``altered`` or the refusal."""
    state = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    name = parse_name(folder.name)
    # torch warns that there is no process group, which is intended here.
    warnings.simplefilter("ignore", UserWarning)
    try:
        if name is None:
            load(state, storage_reader=FileSystemReader(folder))
        else:
            storage = PatientReader(open_storage(str(folder.parent)))
            manifest = read_manifest(storage, name)
            problems = [check_file(storage, name.file(f), i) for f, i in manifest.files.items()]
            if any(problems):
                return "refused (digest)"
            load(state, storage_reader=Reader(storage, name, manifest))
    except BaseException as error:  # torch's CheckpointException is not an Exception
        return f"refused ({type(error).__name__})"
    return "equal" if all(torch.equal(state[key], saved[key]) for key in saved) else "altered"


class Code:
    """A forged pickle that calls a function when it is read. This one is harmless."""

    def __reduce__(self) -> Any:
        return called, ()


RAN: list[int] = []


def called() -> None:
    """Record that a pickle has called this function."""
    RAN.append(1)


def damaged(folder: Path, saved: dict[str, Tensor]) -> dict[str, str]:
    """Return the outcome of loading a checkpoint intact, with a flipped bit, cut, and forged."""
    found = {"one process": restored(folder, saved)}
    largest = max((file for file in folder.iterdir()), key=lambda file: file.stat().st_size)
    whole = largest.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 1  # inside a tensor, not between two
    for what, data in {"one bit flipped": bytes(flipped), "cut": whole[: len(whole) // 2]}.items():
        largest.write_bytes(data)
        found[what] = restored(folder, saved)
    largest.write_bytes(whole)
    for file in (folder / ".metadata", folder / "metadata.json"):
        if file.exists():
            file.write_bytes(pickle.dumps(Code()))
    RAN.clear()
    found["forged"] = restored(folder, saved) + (", after its code ran" if RAN else "")
    return found


def compare(megabytes: float, ranks: int, rounds: int) -> dict[str, Any]:
    """Return the figures of every writer."""
    found = {}
    torch.manual_seed(0)
    saved = model_state(megabytes * 1e6)
    for writer in WRITERS:
        with TemporaryDirectory() as folder:
            by_rank = run_ranks(measure, ranks, writer, folder, megabytes, rounds, timeout_s=600.0)
            last = max(Path(folder).iterdir(), key=lambda one: one.stat().st_mtime)
            written = sizes_bytes(last)
            found[writer] = {
                **{key: max(figures[key] for figures in by_rank) for key in by_rank[0]},
                "written_bytes": written,
                "balance": max(written) * ranks / sum(written),
                "damage": damaged(last, saved),
            }
    return found


def main() -> None:
    """Compare the writers and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=256.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = compare(arguments.megabytes, arguments.ranks, arguments.rounds)
    if arguments.json:
        print(json.dumps(found))
        return
    for writer, figures in found.items():
        print(
            f"{writer:10} blocked {1e3 * figures['blocked_s']:6.0f} ms   "
            f"all {1e3 * figures['all_s']:6.0f} ms   "
            f"memory {figures['memory_bytes'] / 1e6:5.0f} MB   "
            f"balance {figures['balance']:.2f}"
        )
        for damage, outcome in figures["damage"].items():
            print(f"{'':10} {damage}: {outcome}")


if __name__ == "__main__":
    main()
