"""A process group of our own: of whom, by what, and when there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from evenstride.runtime.groups import own_group

GROUP = object()


def _team(group: Any = GROUP, channel: Any = None) -> Any:
    return cast(Any, SimpleNamespace(group=group, channel=channel))


def test_a_process_alone_has_none() -> None:
    assert own_group(_team()) is None
    assert own_group(_team(None, SimpleNamespace(timeout=3))) is None


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_it_is_made_among_the_teams_ranks_alone_with_the_teams_patience(
    monkeypatch: pytest.MonkeyPatch, backend: str | None
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dist, "get_process_group_ranks", {GROUP: [4, 6]}.__getitem__)
    monkeypatch.setattr(
        dist,
        "new_group",
        lambda ranks, timeout, backend, *, use_local_synchronization: asked.append(
            (ranks, timeout, backend, use_local_synchronization)
        ),
    )

    own_group(_team(channel=SimpleNamespace(timeout=3)), backend)

    assert asked == [([4, 6], 3, backend, True)]
