"""Rows and tags that every tracker accepts."""

from __future__ import annotations

import re
from posixpath import normpath

from hypothesis import example, given
from hypothesis import strategies as st

from evenstride.runtime.sinks.snapshot import rows_of, tag_of
from tests.unit.runtime.sinks.made import snapshot, with_news


def test_named_means_have_rows_at_their_own_steps() -> None:
    rows = list(rows_of(with_news(40)))

    assert [step for step, _ in rows] == [38, 39, 40]
    assert rows[0][1] == {"evenstride_metric/loss": 0.75}
    assert rows[2][1]["evenstride/epochs"] == 1.5
    assert not [tag for tag in rows[2][1] if "metric" in tag]


def test_workers_share_a_group() -> None:
    ((_, row),) = rows_of(snapshot(workers="ab"))

    groups = [tag.partition("/")[0] for tag in row]
    assert groups.count("evenstride_worker_busy_seconds") == 2


@given(st.text(max_size=300))
def test_every_label_is_a_plain_path_of_permitted_characters(label: str) -> None:
    """What MLflow demands of the name of a metric."""
    tag = tag_of("metric", label)

    assert re.fullmatch(r"[/\w.\- :]{1,250}", tag)
    assert normpath(tag) == tag
    assert not tag.startswith(("/", ".."))


@given(st.text("ab/.@ ", max_size=6), st.text("ab/.@ ", max_size=6))
@example("a@", "a ")
@example("a//", "a/_")
def test_different_labels_have_different_tags(one: str, other: str) -> None:
    assert (tag_of("metric", one) == tag_of("metric", other)) == (one == other)
