"""What live mode refuses before it meets anybody."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import evenstride.integrations.torchft as live
from evenstride.errors import ConfigError


@pytest.fixture
def stride(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class, with nothing of it in the environment."""
    pytest.importorskip("torchft", reason="torchft is not installed")
    monkeypatch.delenv("REPLICA_GROUP_ID", raising=False)
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    return live.LiveStride


def test_without_torchft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "find_spec", lambda _: None)

    with pytest.raises(ConfigError, match=r"pip install .evenstride\[live\]"):
        live.LiveStride  # noqa: B018 (looking is enough)


def test_other_names_raise_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Stride'"):
        importlib.import_module(live.__name__).Stride  # noqa: B018 (looking is enough)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"lighthouse": "http://nowhere:1"}, "no name, and REPLICA_GROUP_ID is not set"),
        ({"name": "a"}, "no lighthouse, and TORCHFT_LIGHTHOUSE is not set"),
        ({"policy": "static:20,100"}, "a share for each worker"),
        ({"policy": "none"}, "none"),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"min_workers": 0}, "min_workers is 0"),
    ],
)
def test_invalid_input_is_refused(stride: Any, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        stride(**{"global_batch": 12, **asked})
