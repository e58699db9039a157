"""The environment variables of ranks that this machine starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from evenstride.runtime.host.network_interfaces import ON_LOOPBACK
from evenstride.runtime.store.store_server import meeting_at, serve_store

LOCAL = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    **ON_LOOPBACK,
    # Every connection to a store looks up its peer's name; each lost packet would cost 5 s.
    "RES_OPTIONS": "timeout:1 attempts:1",
}
"""Loopback only, and one thread each: ranks that share a machine compete for its cores."""

STEADY = {
    **LOCAL,
    # By default glibc returns large blocks to the kernel at every step. Faulting them in again
    # takes a third of the step, and the time varies.
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
}
"""Variables that make step times on a CPU comparable. Apply them first, so users can override."""


def rank_variables(rank: int, world_size: int, store: tuple[str, int]) -> dict[str, str]:
    """Return the environment variables of one rank of a group on this machine.

    ``store`` is the host and port of a store that outlives the ranks; see `serve_store`.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        **meeting_at(*store),
    }


@contextlib.contextmanager
def lone_rank() -> Iterator[dict[str, str]]:
    """Serve a store for a group of one rank, and yield the rank's variables."""
    with serve_store() as store:
        yield rank_variables(0, 1, store)
