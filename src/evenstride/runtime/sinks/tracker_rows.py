"""A snapshot as the rows of experiment trackers: tags with permitted characters, and values."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2s
from itertools import groupby
from re import sub

from evenstride.runtime.sinks.snapshot import BY_NAME, Sample, Snapshot

_LONGEST = 200  # characters of a label; MLflow allows 250 in a tag


def rows_of(snapshot: Snapshot) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield steps with their values by tag: those of named means first, then that of the snapshot.

    Cost:
        3 us for each value.
    """
    for step, means in groupby(snapshot.found, key=lambda one: one.step):
        yield step, {tag_of("metric", one.name): one.value for one in means}
    # Means have their own steps, so their latest values are left out here.
    numbers = [sample for sample in snapshot.samples if sample.metric != "metric"]
    if snapshot.epochs is not None:
        numbers.append(Sample("epochs", "", snapshot.epochs))
    if numbers:
        yield snapshot.step, {tag_of(metric, label): value for metric, label, value in numbers}


def tag_of(metric: str, label: str) -> str:
    """Return a tag: one group per metric, with characters that every tracker permits.

    A label with other characters gets a part of its hash, so ``acc@1`` and ``acc 1`` differ. So
    does one that is no plain path, because MLflow refuses ``a//b`` and ``../b``.

    >>> tag_of("step_seconds", ""), tag_of("worker_busy_seconds", "host/0")
    ('evenstride/step_seconds', 'evenstride_worker_busy_seconds/host/0')
    """
    if metric in BY_NAME and not BY_NAME[metric].label:
        return f"evenstride/{metric}"
    allowed = sub(r"[^-/\w.]", "_", label)
    parts = ("_" if part in ("", ".", "..") else part for part in allowed.split("/"))
    allowed = "/".join(parts)[:_LONGEST].rstrip("/")
    if allowed != label:
        digest = blake2s(label.encode("utf-8", "backslashreplace"), digest_size=3)
        allowed += f"-{digest.hexdigest()}"
    return f"evenstride_{metric}/{allowed}"
