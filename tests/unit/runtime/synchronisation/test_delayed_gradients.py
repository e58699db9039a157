"""The times that a rank's clock records with delayed gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from evenstride.core.sampling.draw import Draw
from evenstride.core.sync_modes.mode_specs import RoundPosition
from evenstride.runtime.synchronisation.delayed_gradients import DelayedTraining
from evenstride.runtime.timing.device_timer import RankClock
from tests.messages import check_message


class Clock:
    """Stands in for the rank's clock."""

    def __init__(self) -> None:
        self.waits = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self.waits = True
        yield
        self.waits = False

    def gradients_ready(self) -> None:
        assert not self.waits


PLACES = {"mid": RoundPosition(0, 0, 4, 99, 4), "end": RoundPosition(0, 0, 4, 4, 4)}


@pytest.mark.parametrize("name", PLACES)
def test_waiting_for_gradients_is_never_busy_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    place, clock, arrived = PLACES[name], Clock(), list[bool]()

    class Sent:
        """Gradients that arrive at once."""

        def __init__(self, *_: Any) -> None:
            pass

        def arrive(self) -> None:
            arrived.append(clock.waits)

    monkeypatch.setattr(
        "evenstride.runtime.synchronisation.delayed_gradients.GradientInFlight", Sent
    )
    timer: Any = clock
    sync = DelayedTraining(2, lambda: None, RankClock(timer), lambda _: place)
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    sync.watch(module)
    sync.factor(Draw(step=0, window=4, share=2, samples=2, first=True, last=True))

    for _ in range(2):
        sync.before_step(optimizer)
        sync.after_step(optimizer)

    assert arrived == ([True] if not place.ends_epoch else [True, True])
    sync.close(in_order=True)
    assert len(caplog.messages) == (name == "mid")
    check_message(caplog.messages)
