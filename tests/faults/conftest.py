"""What all tests of faults share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from evenstride.runtime.launching.process_starters import FromZygote
from tests.faults import ranks


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    ranks.end_zygote()


@pytest.fixture
def zygote() -> FromZygote:
    """What workers are forked from, for all tests."""
    return ranks.zygote()
