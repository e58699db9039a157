"""A `Stride` of one process, closed when its test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import evenstride

MakeStride = Callable[..., evenstride.Stride]


@pytest.fixture
def make_stride() -> Iterator[MakeStride]:
    """Make a `Stride`; its global batch is 4 unless said otherwise."""
    made: list[evenstride.Stride] = []

    def make(**settings: Any) -> evenstride.Stride:
        made.append(evenstride.Stride(**{"global_batch": 4, **settings}))
        return made[-1]

    yield make
    for stride in made:
        stride.close()
