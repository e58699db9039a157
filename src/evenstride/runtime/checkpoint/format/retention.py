"""Lists the checkpoints of a folder, and deletes old ones once a newer one is complete.

A run deletes the checkpoints that it wrote, the one that it was restored from, and those that it
wrote before a restart, if their manifests still prove that. It deletes no other checkpoint that may
be intact. A checkpoint with a damaged manifest can often be repaired by hand, because its tensors
still exist.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from evenstride.errors import EvenstrideError
from evenstride.runtime.checkpoint.format.manifest import (
    MANIFEST,
    METADATA,
    Manifest,
    Name,
    is_our_file,
    parse_name,
    read_manifest,
)
from evenstride.runtime.checkpoint.format.storage import NotAFile, PatientReader, Storage

COMPLETED = "completed.txt"
"""A file that marks a folder that has held a complete checkpoint. If the folder holds no complete
checkpoint now, it is damaged; without the file, the run's first save did not finish."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The checkpoints from before the last restart that this run may delete."""

    restored: Name | None = None  # the checkpoint that this run was restored from

    # Older ones that the same training run wrote before it was restarted.
    earlier: frozenset[Name] = frozenset()
    damaged: frozenset[Name] = frozenset()  # checkpoints that cannot be restored

    # Identifies the training run; drawn at random if training starts from scratch.
    run: str = field(default_factory=lambda: secrets.token_hex(16))

    def names(self) -> list[str]:
        """Return their names in order, for the manifest of the next checkpoint."""
        own = {*self.earlier, *([] if self.restored is None else [self.restored])}
        return list(map(str, sorted(own)))


def descended(
    restored: Name,
    manifest: Manifest,
    complete: Collection[Name],
    damaged: Collection[Name],
    storage: PatientReader,
) -> Lineage:
    """Return the checkpoints that a restored run may delete.

    A name proves nothing, even if it is listed or has the same generation. An older checkpoint is
    this run's only if its own manifest can be read and names the run. ``complete`` are the attempts
    in the folder with a manifest, ``damaged`` those that were skipped.
    """
    if not manifest.run:  # written by an earlier version, which proves nothing
        return Lineage(restored, damaged=frozenset(damaged))
    older = (name for name in complete if name < restored)
    likely = (n for n in older if n.generation == restored.generation or str(n) in manifest.earlier)
    mine = (name for name in likely if _run_of(storage, name) == manifest.run)
    return Lineage(restored, frozenset(mine), frozenset(damaged), manifest.run)


def _run_of(storage: PatientReader, name: Name) -> str | None:
    try:
        return read_manifest(storage, name).run
    except EvenstrideError:
        return None


def attempts(storage: Storage | PatientReader) -> tuple[list[Name], list[Name]]:
    """Return the attempts with a manifest and those without, each newest first.

    The manifests are not checked. Other files in the folder are ignored.
    """
    names = [name for text in storage.list() if (name := parse_name(text)) is not None]
    names.sort(reverse=True)
    # Not exists(): with many fsspec file systems it returns False after any error.
    ended = {name: MANIFEST in storage.list(str(name)) for name in names}
    return [n for n in names if ended[n]], [n for n in names if not ended[n]]


def to_delete(
    complete: Sequence[Name], begun: Sequence[Name], newest: Name, keep: int, lineage: Lineage
) -> list[Name]:
    """Return the attempts to delete now that ``newest`` has its manifest.

    These are complete attempts of this run beyond the newest ``keep``, and attempts since the last
    restart that never finished. Twice as many are kept until ``keep`` checkpoints have been written
    since the restart: the restored one may be the only one that is known to be intact. ``complete``
    are the attempts with a manifest, newest first, and ``begun`` those without.

    >>> a, b, c = (Name(step, "0" * 12, 0) for step in (1, 2, 3))
    >>> list(map(str, to_delete([c, b, a], [], newest=c, keep=2, lineage=Lineage())))
    ['step-000000001-000000000000-0']
    """
    written = [name for name in complete if name.generation == newest.generation]
    settled = len(written) >= keep
    mine = {lineage.restored, *lineage.earlier, *written}
    older = [name for name in complete if name < newest and name in mine]
    good = [name for name in older if name not in lineage.damaged]
    bad = [name for name in older if name in lineage.damaged]
    left = [name for name in begun if name < newest and name.generation == newest.generation]
    stay = keep if settled else 2 * keep
    return good[stay - 1 :] + bad + left


def next_generation(storage: Storage, now_unix_s: float, drawn: int) -> str:
    """Return the generation of a run that starts now: later than any that has saved.

    Its first eight digits are the time in seconds, or one more than the largest number of an
    earlier run with a faster clock. The last four are ``drawn``, a random number of 16 bits, so
    that two runs that start in the same second differ.
    """
    known = [int(name.generation[:8], 16) for text in storage.list() if (name := parse_name(text))]
    number = max(int(now_unix_s), *(number + 1 for number in known), 0)
    return f"{min(number, 2**32 - 1):08x}{drawn:04x}"


def later_run(storage: Storage, mine: Name) -> Name | None:
    """Return an attempt of a run that started later than this one, if any."""
    names = (name for text in storage.list() if (name := parse_name(text)) is not None)
    return next((name for name in names if name.generation > mine.generation), None)


def delete(storage: Storage, name: Name) -> None:
    """Delete an attempt: its manifest first, so that a partial one never looks complete.

    Files that evenstride did not write are kept, and so is their folder.
    """
    storage.delete(name.file(MANIFEST))
    for file in storage.list(str(name)):
        if is_our_file(file):
            storage.delete(name.file(file))
    storage.delete_folder(str(name))


def prune(storage: Storage, newest: Name, keep: int, lineage: Lineage) -> None:
    """Mark the folder as having a complete checkpoint, and delete those that are not needed."""
    # First: whatever is lost later, restore() knows that a complete checkpoint existed.
    if COMPLETED not in storage.list():
        note = f"{newest} is complete. If no checkpoint here can be read, restore() raises.\n"
        storage.write(COMPLETED, [note.encode()])
    complete, begun = attempts(storage)
    if newest not in complete:  # the store does not list the new files yet: after the next save
        return
    superfluous = to_delete(complete, begun, newest, keep, lineage)
    foreign = (name for name in begun if name < newest and name not in superfluous)
    for name in [*superfluous, *(n for n in foreign if _is_remnant(storage, n))]:
        with contextlib.suppress(NotAFile):  # evenstride made no link or file of that name
            delete(storage, name)


def _is_remnant(storage: Storage, name: Name) -> bool:
    """Return whether an attempt never finished: the manifest is written after the index."""
    return METADATA not in storage.list(str(name))
