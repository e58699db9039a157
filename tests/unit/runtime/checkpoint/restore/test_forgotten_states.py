"""A learning-rate scheduler that is not saved causes a warning, and no other object does."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from evenstride.runtime.checkpoint.restore.saved_state import SavedObjects
from evenstride.runtime.checkpoint.save.preparing import warn_if_unsaved
from tests.messages import check_message


def _training() -> SavedObjects:
    model = nn.Linear(1, 1)
    return SavedObjects(model, (torch.optim.SGD(model.parameters(), lr=0.1),), (), {})


def test_variables_of_a_script_are_not_mistaken_for_a_scheduler(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = _training()
    variables = {"optimizer": training.optimizers[0], "last_epoch": -1}

    with caplog.at_level(logging.WARNING, "evenstride"):
        warn_if_unsaved(training, "train.py:1")

    assert variables["last_epoch"] == -1
    assert not caplog.messages


def test_a_scheduler_with_a_dictionary_of_attributes_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = _training()
    scheduler = StepLR(training.optimizers[0], 5)
    vars(scheduler)["mark"] = 1  # makes Python keep them in one

    with caplog.at_level(logging.WARNING, "evenstride"):
        warn_if_unsaved(training, "train.py:1")

    (line,) = caplog.messages
    check_message(line, "StepLR")
