"""Which checkpoints there are, and which of them go once a newer one is in place.

A run deletes what it wrote, what it was restored from, and what it wrote before it was restarted,
if the manifest still proves that. It never deletes anything else that may be intact: a checkpoint
whose manifest is damaged can often be repaired by hand, since its tensors are still there.
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
"""A file that says that this folder has held a complete checkpoint. Where it is, a folder without
one is damaged; where it is not, the first save of the run did not end."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The checkpoints of others that this run may delete, as it goes on from them."""

    restored: Name | None = None  # the checkpoint that this run was restored from
    # older ones that the same training run wrote before it was restarted
    earlier: frozenset[Name] = frozenset()
    damaged: frozenset[Name] = frozenset()  # those that cannot be restored
    # identifies the training run; drawn if training starts from scratch
    run: str = field(default_factory=lambda: secrets.token_hex(16))

    def names(self) -> list[str]:
        """Return all of them in order, for the manifest of the next checkpoint."""
        own = {*self.earlier, *([] if self.restored is None else [self.restored])}
        return list(map(str, sorted(own)))


def descended(
    restored: Name,
    manifest: Manifest,
    complete: Collection[Name],
    damaged: Collection[Name],
    storage: PatientReader,
) -> Lineage:
    """Return what a run may delete once it has been restored.

    A name proves nothing, whether it is listed or of the same generation: an older checkpoint is
    this run's only if its own manifest can be read and names the run. ``complete`` are the attempts
    in the folder that have a manifest, ``damaged`` those that were passed over.
    """
    if not manifest.run:  # of an earlier version, which proves nothing
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
    """Return the attempts that have a manifest, and those that have none, newest first.

    Whether a manifest is right is not looked at. Whatever else is in the folder is passed over.
    """
    names = [name for text in storage.list() if (name := parse_name(text)) is not None]
    names.sort(reverse=True)
    # Not exists(): many file systems of fsspec take any error for a file that is not there.
    ended = {name: MANIFEST in storage.list(str(name)) for name in names}
    return [n for n in names if ended[n]], [n for n in names if not ended[n]]


def to_delete(
    complete: Sequence[Name], begun: Sequence[Name], newest: Name, keep: int, lineage: Lineage
) -> list[Name]:
    """Return the attempts that ``newest``, whose manifest is in place, makes superfluous.

    Those are complete attempts of this run beyond the newest ``keep``, and attempts of this life
    that never ended. Until this life has written ``keep`` checkpoints itself, twice as many stay:
    the restored one may be the only one that is known to be whole. ``complete`` are the attempts
    with a manifest, newest first, and ``begun`` those without.

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
    """Return the generation of a run that begins now: later than any that has saved.

    Eight digits are the time in seconds, as far as the clocks of all machines agree; where the
    clock of a run before was ahead, one more than its number. Four are ``drawn``, a random number
    of 16 bits, so that two runs that begin in the same second do not have the same one.
    """
    known = [int(name.generation[:8], 16) for text in storage.list() if (name := parse_name(text))]
    number = max(int(now_unix_s), *(number + 1 for number in known), 0)
    return f"{min(number, 2**32 - 1):08x}{drawn:04x}"


def later_run(storage: Storage, mine: Name) -> Name | None:
    """Return an attempt of a run that began later than this one, if there is any."""
    names = (name for text in storage.list() if (name := parse_name(text)) is not None)
    return next((name for name in names if name.generation > mine.generation), None)


def delete(storage: Storage, name: Name) -> None:
    """Delete an attempt: its manifest first, so that no half of it is ever taken for complete.

    Files that are not ours stay, and so does the folder then.
    """
    storage.delete(name.file(MANIFEST))
    for file in storage.list(str(name)):
        if is_our_file(file):
            storage.delete(name.file(file))
    storage.delete_folder(str(name))


def prune(storage: Storage, newest: Name, keep: int, lineage: Lineage) -> None:
    """Note that there is a complete checkpoint, and delete what it makes superfluous."""
    # First: whatever is lost later, restore() knows that there was a whole checkpoint.
    if COMPLETED not in storage.list():
        told = f"{newest} is complete. If no checkpoint here can be read, restore() raises.\n"
        storage.write(COMPLETED, [told.encode()])
    complete, begun = attempts(storage)
    if newest not in complete:  # a store that does not list yet what it has: another time
        return
    superfluous = to_delete(complete, begun, newest, keep, lineage)
    foreign = (name for name in begun if name < newest and name not in superfluous)
    for name in [*superfluous, *(n for n in foreign if _is_remnant(storage, n))]:
        with contextlib.suppress(NotAFile):  # a link or a file of that name is not ours
            delete(storage, name)


def _is_remnant(storage: Storage, name: Name) -> bool:
    """Return whether an attempt was never complete: the manifest is written after the table."""
    return METADATA not in storage.list(str(name))
