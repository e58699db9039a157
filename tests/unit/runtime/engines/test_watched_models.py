"""What averages a model's gradients, wherever in a wrapper it is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evenstride.runtime.engines.watched_models import WatchedModels, averages


class Engine(nn.Module):
    """A module that averages gradients, as FSDP2's do."""

    def set_requires_gradient_sync(self, on: bool) -> None:
        raise NotImplementedError


class Holder(nn.Module):
    """A wrapper that keeps something in a plain attribute."""

    def __init__(self, held: object) -> None:
        super().__init__()
        object.__setattr__(self, "held", held)


WRAPPERS: dict[str, Callable[[], nn.Module]] = {
    "itself": Engine,
    "a part": lambda: nn.Sequential(nn.Linear(1, 1), Engine()),
    "a plain attribute": lambda: Holder(Engine()),
    "a part of a plain attribute": lambda: Holder(nn.Sequential(Engine())),
    "a list": lambda: Holder([Engine()]),
    "a dictionary of a part": lambda: nn.Sequential(Holder({"engine": Engine()})),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_an_engine_is_found_in_any_wrapper(name: str) -> None:
    assert averages(WRAPPERS[name]())


@pytest.mark.parametrize(
    ("dynamic", "by_shape"), [(None, True), (False, True), (True, False)], ids=str
)
def test_a_model_is_compiled_for_each_batch_size_unless_it_is_dynamic(
    dynamic: bool | None, by_shape: bool
) -> None:
    watched, plain = WatchedModels(), WatchedModels()

    part: Any = torch.compile(nn.Linear(1, 1), backend="eager", dynamic=dynamic)
    watched.add(nn.Sequential(part))
    plain.add(nn.Linear(1, 1))

    assert (watched.compiled, watched.compiled_by_shape) == (True, by_shape)
    assert not plain.compiled_by_shape


def test_a_bare_module_has_no_engine() -> None:
    assert not averages(nn.Sequential(nn.Linear(1, 1), Holder(nn.Linear(1, 1))))


AMONG_ALL = """
import gc
from torch import nn
from evenstride.runtime.engines.watched_models import engine_exists

class Engine(nn.Module):
    def no_sync(self):
        raise NotImplementedError

assert not engine_exists()
engine = Engine()
assert engine_exists()
gc.freeze()
assert engine_exists()
"""


def test_an_engine_is_found_among_all_objects_also_frozen_ones() -> None:
    """In a process of its own, as other tests leave engines behind in this one."""
    run = subprocess.run([sys.executable, "-c", AMONG_ALL], timeout=100, check=False)
    assert run.returncode == 0
