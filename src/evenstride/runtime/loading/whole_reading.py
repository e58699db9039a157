"""Lets a data set be read as a whole in each loader process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.data._utils import worker as torch_worker


@contextmanager
def whole_stream() -> Iterator[None]:
    """Hide from data sets that they are read in a loader process.

    Data sets split their samples by `torch.utils.data.get_worker_info`, but each process must read
    the whole stream or shard. torch has no public way to say so.
    """
    before = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = before
