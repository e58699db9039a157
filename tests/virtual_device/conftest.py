"""Ranks with a virtual device, in processes of their own: the device stays in a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evenstride.testing import RankPool
from tests.faults.ranks import end_zygote
from tests.virtual_device.extension import BUILD_LIMIT_S, built, missing

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave time for the build, which the first test of a run waits for."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(BUILD_LIMIT_S + 120))


@pytest.fixture(scope="session")
def virtual_ranks() -> Iterator[RankPool]:
    """A pool of ranks that may call `device_module.install`; builds the device if needed."""
    if reason := missing():
        pytest.skip(reason)
    built()
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def virtual_scripts() -> Iterator[None]:
    """Prepares for scripts that use the device; `tests.faults.ranks` starts them."""
    if reason := missing():
        pytest.skip(reason)
    built()
    yield
    end_zygote()
