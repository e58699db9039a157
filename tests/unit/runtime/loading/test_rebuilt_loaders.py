"""Loaders as frameworks use them: built again, and counted."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from evenstride.errors import UsageError
from tests.messages import check_message, raises_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.solo import numbered


@pytest.mark.parametrize("seeded", [True, False])
def test_a_loader_that_was_built_again_is_refused(make_stride: MakeStride, seeded: bool) -> None:
    loader = make_stride().loader(numbered(12), seeded=seeded)
    rebuilt = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)

    with raises_message(UsageError):
        next(iter(rebuilt))


def test_an_evaluation_that_stops_at_the_number_of_steps_warns_once(
    make_stride: MakeStride, caplog: pytest.LogCaptureFixture
) -> None:
    stride = make_stride()
    loader = stride.loader(numbered(10), train=False, max_micro_batch=3)

    for _ in range(2):
        batches = iter(loader)
        for _ in range(len(loader)):
            next(batches)
        batches.close()  # type: ignore[attr-defined]

    check_message(caplog.messages, "max_micro_batch")
