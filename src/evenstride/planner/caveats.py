"""What makes a plan's figures less sure than they look, one sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from evenstride.planner.catalogue.offers import Catalogue
from evenstride.planner.search.training_forecast import ClusterChoice
from evenstride.planner.spot_losses import SaveCosts
from evenstride.planner.workload.step_time import fitted
from evenstride.planner.workload.workload_profile import DeviceProfile

BADLY = 0.1
"""Error of a fit, as a part, from which a profile should be measured again."""

_FLAT = 0.01  # of a step at the largest size, below which its samples take next to nothing
_MOST_NAMED = 8


def of_device(device: DeviceProfile) -> Iterator[str]:
    curve = fitted(device.points)
    if curve.error > BADLY:
        yield (
            f"the profile of {device.type} fits badly: its steps are off their line, or wandered, "
            f"by {curve.error:.0%}; measure it again while the machine is at no other work, and "
            "for longer (evenstride profile --seconds)"
        )
    if curve.per_sample_s * curve.largest < _FLAT * curve.fixed_s:
        yield (
            f"steps on {device.type} took no longer with {curve.largest} samples than with few, so "
            "what a sample takes is not known; measure larger ones (evenstride profile --parts, "
            "and a larger batch in the script)"
        )


def of_accelerator(device: DeviceProfile, catalogue: Catalogue) -> str:
    """Return why a type's steps say nothing of it: a processor computed them; empty if they do."""
    if device.computed_on != "cpu":
        return ""
    own = {o.accelerator for o in catalogue.offers if o.instance_type == device.type}
    if not own or "" in own:
        return ""
    return (
        f"steps were computed by a processor, and {device.type} has the accelerator "
        f"{' or '.join(sorted(own))}, which stayed idle: evenstride plan refuses that. Move model "
        'and batches to the device in the script (.to("cuda")) and measure again, or call the '
        "machine what it is (--type)"
    )


def of_spot(choice: ClusterChoice, saves: SaveCosts) -> list[str]:
    if not choice.spot:
        return []
    told = [
        "machines may be taken away, and nobody has looked whether the script saves: it needs an "
        "evenstride.Checkpointer (restore() before the loop, step() in it), or each loss begins "
        f"training anew. A save is taken to cost {saves.save_s:g} s, a restart "
        f"{_minutes(saves.mean_restart_s)} on average (--restart)"
    ]
    for kind in choice.kinds:
        if kind.transience is not None:
            found = kind.transience.losses_per_h
            told.append(
                f"{kind.name}: {found.value:.2g} losses of one machine an hour ({found.low:.2g} to "
                f"{found.high:.2g}): {kind.transience.reason}"
            )
    return told


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{seconds:.3g} s"


def nearest_types(name: str, catalogue: Catalogue) -> str:
    there = {offer.instance_type.lower(): offer.instance_type for offer in catalogue.offers}
    near = [there[found] for found in get_close_matches(name.lower(), there)]
    if near:
        return f"nearest are {', '.join(near)}"
    some = sorted(there.values())
    more = f" and {len(some) - _MOST_NAMED} more" if len(some) > _MOST_NAMED else ""
    return f"it has {', '.join(some[:_MOST_NAMED])}{more}"


def no_machine(devices: Iterable[DeviceProfile], catalogue: Catalogue) -> str:
    """Return why none of a catalogue's machines can be planned with, and what to do."""
    there = {offer.instance_type for offer in catalogue.offers}
    missing = sorted({one.type for one in devices if one.type.partition("+")[0] not in there})
    if not missing:
        return (
            "there is no machine to plan with: of those that are left by --types, --regions and "
            "--no-transfer, none was measured, and none has hardware like one that was; leave some "
            "of these out"
        )
    return (
        f"there is no machine to plan with: {catalogue.source} has no {' or '.join(missing)}, so "
        f"neither its price nor its hardware is known ({nearest_types(missing[0], catalogue)}). "
        "Give a --catalog in which it is (a CSV of type,price is enough), or call what was "
        "measured what the catalogue calls it (evenstride profile --type, or --as)"
    )
