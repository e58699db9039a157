"""Why no cluster can train a workload, and by how much to relax what binds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from evenstride.errors import ConfigError
from evenstride.planner.catalogue.offers import Catalogue
from evenstride.planner.search.candidates import Kind

MOST_MACHINES = 128
"""Most machines that a plan may be asked to look at (``--max-nodes``)."""

_NAMED = 8


def why_none(kinds: Sequence[Kind], batches: Sequence[int], most_machines: int) -> str:
    """Return what no cluster can keep to, and by how much to relax it, in one sentence.

    Memory and numbers of workers are judged by the batch that comes nearest to fitting.
    """
    smallest, largest = min(batches), max(batches)
    fewest = min(kinds, key=lambda kind: kind.workers)
    if fewest.workers > largest:
        return (
            f"a batch of {largest} is smaller than the {fewest.workers} workers of one "
            f"{fewest.name}, and each needs a sample; take a batch of at least {fewest.workers} "
            "(--batches), or types with fewer accelerators"
        )
    able = [kind for kind in kinds if kind.workers <= largest]
    if not any(_fits(kind, batch, most_machines) for kind in able for batch in batches):
        return _too_little_memory(able, smallest, most_machines)
    if any(kind.spot for kind in able):
        return (
            "machines are taken away so often that training may never end on any cluster that it "
            "fits; plan without --spot, shorten --restart, or take types that are taken away "
            "less often"
        )
    return "no cluster can train this in a time that can be told; take other types or other batches"


def _fits(kind: Kind, batch: int, most_machines: int) -> bool:
    return kind.workers <= batch <= _room(kind) * most_machines


def _room(kind: Kind) -> float:
    """Return the samples that fit one machine."""
    return inf if kind.most_samples is None else kind.workers * kind.most_samples


def _too_little_memory(kinds: Sequence[Kind], batch: int, most_machines: int) -> str:
    roomiest = max(kinds, key=_room)
    room = int(_room(roomiest))
    needed = -(-batch // room)
    plural = "" if most_machines == 1 else "s"
    more = f"allow {needed} machines (--max-nodes {needed}), or " if needed <= MOST_MACHINES else ""
    return (
        f"memory is too small: a batch of {batch}, the smallest, takes {needed} machines of the "
        f"roomiest type, {roomiest.name}, with room for {room} samples each, and {most_machines} "
        f"machine{plural} may be taken; {more}take a batch of at most {room * most_machines} "
        "(--batches), or types with more memory"
    )


def selected(
    catalogue: Catalogue, regions: Iterable[str] = (), types: Iterable[str] = ()
) -> Catalogue:
    """Return the offers of some regions and types.

    Raises:
        ConfigError: a name is not in the catalogue, or each is but no offer has both; the message
            says which filter leaves nothing, and what would leave something.
    """
    wanted, named = tuple(regions), tuple(types)
    found = catalogue.select(regions=wanted, types=named)
    if found.offers or not catalogue.offers:
        return found
    there = {offer.region for offer in catalogue.select(types=named).offers}
    here = sorted({offer.instance_type for offer in catalogue.select(regions=wanted).offers})
    more = f" and {len(here) - _NAMED} more" if len(here) > _NAMED else ""
    raise ConfigError(
        f"{catalogue.source} has no {' or '.join(named)} in {' or '.join(wanted)}: --types and "
        f"--regions together leave nothing. The types are in {', '.join(sorted(there))}, and the "
        f"regions have {', '.join(here[:_NAMED])}{more}; leave out one of the two, or change it"
    )
