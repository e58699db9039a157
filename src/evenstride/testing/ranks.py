"""Run a function as several ranks of one process group, each in its own process."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

from evenstride.runtime.launching.rank_environment import LOCAL

_LOOPBACK = "127.0.0.1"
# Time for the other ranks to finish after one has failed.
_AFTERMATH_S = 2.0


@dataclass(frozen=True, slots=True)
class _Job:
    fn: Callable[..., Any]
    args: tuple[object, ...]
    rank: int
    world_size: int
    port: int
    timeout_s: float


class RankPool:
    """Processes with torch imported, which several runs use, because starting them is slow.

    Use it as a context manager, or call `close`. A run that fails or hangs ends all processes, and
    the next run starts new ones. Each rank has one thread and a Gloo group on loopback.
    """

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: object,
        timeout_s: float = 60.0,
        group_timeout_s: float | None = None,
    ) -> list[Any]:
        """Return ``[fn(0, *args), ..., fn(world_size - 1, *args)]``, one process each.

        Args:
            fn: function that can be imported by name. Its first argument is the rank. Its result
                must be plain data, because a tensor does not outlive its process.
            world_size: number of ranks.
            *args: further arguments, which must be picklable.
            timeout_s: deadline for all ranks together, in seconds.
            group_timeout_s: timeout of the process group in seconds; ``timeout_s`` if ``None``.

        Raises:
            AssertionError: a rank raised (the message has its traceback), died, or was still
                running at the deadline.
        """
        self._start(world_size)
        with loopback_store() as port:
            for rank, pipe in enumerate(self._pipes[:world_size]):
                pipe.send(_Job(fn, args, rank, world_size, port, group_timeout_s or timeout_s))
            try:
                return self._collect(world_size, time.monotonic() + timeout_s)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._pipes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, count: int) -> None:
        context = mp.get_context("spawn")
        with _environment(LOCAL):
            while len(self._processes) < count:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), daemon=False)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)

    def _collect(self, world_size: int, deadline_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < world_size:
            open_pipes = [self._pipes[r] for r in range(world_size) if r not in results | failures]
            left_s = deadline_s - time.monotonic()
            ready = wait(open_pipes, max(left_s, 0))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                ok, value = self._receive(rank)
                (results if ok else failures)[rank] = value
            if failures:
                deadline_s = min(deadline_s, time.monotonic() + _AFTERMATH_S)
        if failures:
            texts = "\n".join(f"rank {r}:\n{text}" for r, text in sorted(failures.items()))
            raise AssertionError(f"{len(failures)} of {world_size} ranks failed\n{texts}")
        late = sorted(set(range(world_size)) - results.keys())
        if late:
            self._show_stacks(late)
        assert not late, f"ranks {late} did not finish in time; their stacks are on stderr"
        return [results[rank] for rank in range(world_size)]

    def _show_stacks(self, ranks: list[int]) -> None:
        """Make hung ranks print the stacks of all their threads."""
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        wait([self._pipes[rank] for rank in ranks], _AFTERMATH_S)

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            ok, value = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join()
            return False, f"died with exit code {self._processes[rank].exitcode}"
        return bool(ok), value


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: object, timeout_s: float = 60.0
) -> list[Any]:
    """Return the result of `RankPool.run`, from new processes that end with the call."""
    with RankPool() as pool:
        return pool.run(fn, world_size, *args, timeout_s=timeout_s)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables that are unset, for processes started in the block."""
    mine = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            del os.environ[name]


@contextlib.contextmanager
def loopback_store() -> Iterator[int]:
    """Serve a store for one process group on a free loopback port; yield the port."""
    from evenstride.runtime.store.store_server import serve_store

    with serve_store(_LOOPBACK) as (_, port):
        yield port


def _serve(pipe: Connection) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Loader processes of a rank start as in a script that is run from the shell.
    mp.set_start_method("fork", force=True)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, _as_rank(job))
        except BaseException:  # the report has every cause of a failure
            answer = (False, traceback.format_exc())
        pipe.send(answer)


def _as_rank(job: _Job) -> Any:
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from evenstride.runtime.engines.process_groups import take_down_group

    timeout = timedelta(seconds=job.timeout_s)
    store = TCPStore(_LOOPBACK, job.port, None, False, timeout=timeout)
    dist.init_process_group(
        "gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=timeout
    )
    dist.barrier()  # a rank whose function returns at once must not leave while others connect
    try:
        return job.fn(job.rank, *job.args)
    finally:
        take_down_group()
        _forget_meshes()
        # The garbage collector might destroy a process group in a process that the next run
        # forks, and crash it.
        gc.collect()
        # The remaining objects, such as modules, stay. To scan them takes longer than most runs.
        gc.freeze()


def _forget_meshes() -> None:
    """Clear the caches of DTensor about the device meshes of the run."""
    # A mesh of the next run compares equal to one of this run. DTensor would use the cached results
    # for it, which name destroyed process groups. (Seen in torch 2.13: "Could not resolve the
    # process group registered under the name 9".)
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, debug
    from torch.distributed.tensor._redistribute import _gen_transform_infos

    _gen_transform_infos.cache_clear()
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
    else:  # torch 2.6
        dispatcher: Any = DTensor._op_dispatcher
        dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
