"""A rank's part of a state, copied aside so that training can go on while it is written.

The copy is the file: one buffer, kept from save to save, that the pieces lie in one after the
other. Writing it takes the interpreter for moments only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from evenstride.runtime.checkpoint.format.manifest import CHUNK_BYTES
from evenstride.runtime.checkpoint.save.write_ownership import Shape, TensorBlock

# Every dtype can be viewed at a multiple of it.
_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Laid:
    """Where a piece lies in a file.

    Args:
        key: of the tensor.
        offset: of the piece in the whole tensor.
        sizes: shape of the piece.
        whole: shape of the whole tensor.
        dtype: of its elements.
        start_bytes: where it begins in the file.
    """

    key: str
    offset: Shape
    sizes: Shape
    whole: Shape
    dtype: torch.dtype
    start_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the piece."""
        return prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy of a rank's pieces.

    Args:
        laid: where each of them is.
        buffer: ``(N,)`` uint8 on the CPU; the file.
        wait: returns once the copies have arrived; for the thread that writes.
    """

    laid: tuple[Laid, ...]
    buffer: Tensor
    wait: Callable[[], object]

    def chunks(self) -> Iterator[memoryview]:
        """Yield the file's bytes."""
        data = self.buffer.numpy().data
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]

    def view(self, laid: Laid) -> Tensor:
        """Return a piece of the copy, as a tensor."""
        return _view(self.buffer, laid)


class Staging:
    """Copies pieces into a buffer that is kept: each copy makes the one before invalid."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, pieces: list[TensorBlock]) -> Staged:
        """Return a copy of the pieces.

        Cost:
            A copy of the pieces' bytes; from CUDA devices queued in the current stream, so that
            only the device's own time is taken.
        """
        laid, size_bytes = lay_out(pieces)
        on_cuda = [piece.data.device for piece in pieces if piece.data.is_cuda]
        if len(self._buffer) < size_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            # Pinned, or a copy from the device would hold up the training thread.
            self._buffer = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=bool(on_cuda))
        buffer = self._buffer[:size_bytes]
        with torch.no_grad():
            for piece, where in zip(pieces, laid, strict=True):
                _view(buffer, where).copy_(piece.data, non_blocking=piece.data.is_cuda)
        return Staged(laid, buffer, partial(_arrived, _marks(on_cuda)))

    def drop(self) -> None:
        """Give the buffer back."""
        self._buffer = torch.empty(0, dtype=torch.uint8)


def lay_out(pieces: list[TensorBlock]) -> tuple[tuple[Laid, ...], int]:
    """Return where the pieces lie in a file, and the file's size in bytes."""
    laid: list[Laid] = []
    end_bytes = 0
    for piece in pieces:
        start_bytes = end_bytes + -end_bytes % _ALIGN_BYTES
        sizes, dtype = tuple(piece.data.shape), piece.data.dtype
        laid.append(Laid(piece.key, piece.offset, sizes, piece.whole, dtype, start_bytes))
        end_bytes = start_bytes + laid[-1].size_bytes
    return tuple(laid), end_bytes


def _view(buffer: Tensor, laid: Laid) -> Tensor:
    stretch = buffer[laid.start_bytes : laid.start_bytes + laid.size_bytes]
    return stretch.view(laid.dtype).view(laid.sizes)


def _marks(devices: list[torch.device]) -> list[torch.cuda.Event]:
    marks = []
    for device in dict.fromkeys(devices):
        with torch.cuda.device(device):
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record()
        marks.append(mark)
    return marks


def _arrived(marks: list[torch.cuda.Event]) -> None:
    for mark in marks:
        mark.synchronize()
