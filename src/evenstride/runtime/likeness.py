"""What a sample looks like, in a few numbers that ranks can compare.

Ranks on unlike machines decode and transform the same file to slightly different numbers, so a
digest of the bytes alone would refuse equal data. A `Likeness` tells what must be equal (labels,
shapes, texts) from what may differ a little (pixels, features).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from evenstride.runtime.agreement import Plain

# More numbers than this are a picture or a signal, which decoders round differently.
_SMALL = 64
_PARTS = 8
_WINDOW = 16
# Arrays are thinned out to about so many numbers before they are summed up.
_MOST_NUMBERS = 1 << 20
_MOST_NEAR = 8  # arrays of one sample that are compared by their numbers
_DEEPEST = 8
_LONGEST = 1000
# As a part of the root mean square of an array.
_TOLERANCE, _TOLERANCE_OF_SMALL = 0.03, 1e-4

_PLACE = re.compile(r"^(?:/|~|\\\\|[A-Za-z]:[\\/]|[a-z][a-z0-9+.-]*://)\S")


class Likeness:
    """Collects what a sample looks like.

    Args:
        sample: of any type. What has no stable content counts by its type alone.
    """

    def __init__(self, sample: Any) -> None:
        self._exact, self._bits = xxhash.xxh3_64(), xxhash.xxh3_64()
        self._near: list[list[float]] = []
        self._add(sample, 0)

    def to_plain(self) -> Plain:
        """Return it as JSON types."""
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
            self._add_array(np.asarray(value))  # an image of PIL
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
    """Return whether two likenesses are those of equal samples, up to rounding."""
    if one["exact"] != other["exact"] or len(one["near"]) != len(other["near"]):
        return False
    return all(map(_close, one["near"], other["near"]))


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    tolerance = max(one[0], other[0])
    return all(abs(a - b) <= tolerance for a, b in zip(one[1:], other[1:], strict=True))


def _outline(flat: npt.NDArray[Any], tolerance: float) -> list[float]:
    """Return the tolerance, and means of parts of an array that tell it from another one."""
    if flat.dtype.kind == "c":
        flat = np.concatenate([flat.real, flat.imag])
    thinned = flat[:: max(1, flat.size // _MOST_NUMBERS)].astype(np.float64)
    numbers = np.nan_to_num(thinned, nan=0.0, posinf=0.0, neginf=0.0)
    means = [part.mean() for part in np.array_split(numbers, min(_PARTS, numbers.size))]
    if numbers.size > _SMALL:  # means of large parts of two noisy signals would be equal
        starts = np.linspace(0, numbers.size - _WINDOW, _PARTS).astype(int)
        means += [numbers[start : start + _WINDOW].mean() for start in starts]
    allowed = tolerance * float(np.sqrt(np.square(numbers).mean()))
    return [float(f"{number:.6g}") for number in (allowed + 1e-12, *means)]


def _stable(value: object) -> object:
    """Return a value without what differs between machines that hold the same data."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, PurePath):
        return value.name
    if isinstance(value, str) and _PLACE.match(value):
        return re.split(r"[\\/]", value.partition("?")[0].rstrip("\\/"))[-1]
    return value


def _parts(value: object) -> list[Any]:
    """Return what a container holds, in an order that is the same everywhere; else nothing."""
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=str) for part in (str(key), value[key])]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, Sequence):
        if value and all(type(part) in (int, float) for part in value[:_LONGEST]):
            return [np.asarray(value)]
        return list(value)
    return []
