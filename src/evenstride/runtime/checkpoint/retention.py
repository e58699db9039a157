"""Which checkpoints there are, and which of them go once a newer one is in place."""

from __future__ import annotations

from collections.abc import Collection

from evenstride.runtime.checkpoint.manifest import MANIFEST, Name, is_our_file, parse_name
from evenstride.runtime.checkpoint.storage import Storage


def attempts(storage: Storage) -> tuple[list[Name], list[Name]]:
    """Return the attempts that have a manifest, and those that have none, newest first.

    Whether a manifest is right is not looked at. Whatever else is in the folder is passed over.
    """
    names = [name for text in storage.list() if (name := parse_name(text)) is not None]
    names.sort(reverse=True)
    ended = {name: storage.exists(name.file(MANIFEST)) for name in names}
    return [n for n in names if ended[n]], [n for n in names if not ended[n]]


def to_delete(
    complete: list[Name], begun: list[Name], newest: Name, keep: int, damaged: Collection[Name]
) -> list[Name]:
    """Return the attempts that ``newest``, whose manifest is in place, makes superfluous.

    Those are the complete ones beyond the newest ``keep``, the damaged ones, and those that
    never ended. What comes after ``newest`` is of a later run, and not touched.

    Args:
        complete: attempts with a manifest, newest first.
        begun: attempts without.
        newest: the one just saved; it is never deleted.
        keep: how many stay, ``newest`` included; at least 1.
        damaged: those known not to be readable.

    >>> a, b, c = (Name(step, "0" * 12, 0) for step in (1, 2, 3))
    >>> list(map(str, to_delete([c, b, a], [], newest=c, keep=2, damaged=())))
    ['step-000000001-000000000000-0']
    """
    good = [name for name in complete if name < newest and name not in damaged]
    bad = [name for name in complete if name < newest and name in damaged]
    return good[keep - 1 :] + bad + [name for name in begun if name < newest]


def next_generation(storage: Storage, now_unix_s: float, drawn: int) -> str:
    """Return the generation of a run that begins now: later than any that has saved.

    Eight digits are the time in seconds, as far as the clocks of all machines agree; where the
    clock of a run before was ahead, one more than its number. Four are drawn, so that two runs
    that begin in the same second do not have the same one.

    Args:
        storage: in which the runs save.
        now_unix_s: by the leader's clock.
        drawn: a random number of 16 bits.
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


def prune(storage: Storage, newest: Name, keep: int, damaged: Collection[Name]) -> None:
    """Delete what a newly saved checkpoint makes superfluous."""
    complete, begun = attempts(storage)
    if newest not in complete:  # a store that does not list yet what it has: another time
        return
    for name in to_delete(complete, begun, newest, keep, damaged):
        delete(storage, name)
