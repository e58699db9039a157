"""Reasons why a plan's figures are less certain than they look, one sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from evenstride.planner.catalogue.offers import Catalogue
from evenstride.planner.search.training_forecast import ClusterChoice
from evenstride.planner.spot_losses import SaveCosts
from evenstride.planner.workload.step_time import fitted
from evenstride.planner.workload.workload_profile import DeviceProfile

BADLY = 0.1
"""Relative error of a fit from which a profile should be measured again."""

_FLAT = 0.01  # fraction of the largest step below which the time of its samples is negligible
_MOST_NAMED = 8


def of_device(device: DeviceProfile) -> Iterator[str]:
    curve = fitted(device.points)
    if curve.error > BADLY:
        yield (
            f"the profile of {device.type} is inaccurate: its step times drifted, or deviate from "
            f"a line, by {curve.error:.0%}; measure it again for longer (evenstride profile "
            "--seconds), without other load on the machine"
        )
    if curve.per_sample_s * curve.largest < _FLAT * curve.fixed_s:
        yield (
            f"steps on {device.type} took as long with {curve.largest} samples as with few, so "
            "the time per sample is unknown; measure larger batches (a larger batch in the "
            "script, and evenstride profile --parts)"
        )


def of_accelerator(device: DeviceProfile, catalogue: Catalogue) -> str:
    """Return why a type's steps are unusable: a processor computed them; empty if they are not."""
    if device.computed_on != "cpu":
        return ""
    own = {o.accelerator for o in catalogue.offers if o.instance_type == device.type}
    if not own or "" in own:
        return ""
    return (
        f"a CPU computed the steps, but {device.type} has the accelerator "
        f"{' or '.join(sorted(own))}, which stayed idle; evenstride plan rejects such a profile. "
        'Move model and batches to the device in the script (.to("cuda")) and measure again, or '
        "give the correct type of the machine (--type)"
    )


def of_spot(choice: ClusterChoice, saves: SaveCosts) -> list[str]:
    if not choice.spot:
        return []
    sentences = [
        "spot machines may be preempted, and the plan does not check whether the script saves "
        "checkpoints: without an evenstride.Checkpointer (restore() before the loop, step() in "
        "it), each preemption restarts training from the beginning. The plan assumes "
        f"{saves.save_s:g} s per save and {_minutes(saves.mean_restart_s)} per restart on average "
        "(--restart)"
    ]
    for kind in choice.kinds:
        if kind.transience is not None:
            found = kind.transience.losses_per_h
            sentences.append(
                f"{kind.name}: {found.value:.2g} preemptions per machine and hour ({found.low:.2g} "
                f"to {found.high:.2g}): {kind.transience.reason}"
            )
    return sentences


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{seconds:.3g} s"


def nearest_types(name: str, catalogue: Catalogue) -> str:
    there = {offer.instance_type.lower(): offer.instance_type for offer in catalogue.offers}
    near = [there[found] for found in get_close_matches(name.lower(), there)]
    if near:
        return f"the nearest are {', '.join(near)}"
    some = sorted(there.values())
    more = f" and {len(some) - _MOST_NAMED} more" if len(some) > _MOST_NAMED else ""
    return f"it has {', '.join(some[:_MOST_NAMED])}{more}"


def no_machine(devices: Iterable[DeviceProfile], catalogue: Catalogue) -> str:
    """Return why no machine of a catalogue can be planned with, and the remedy."""
    there = {offer.instance_type for offer in catalogue.offers}
    missing = sorted({one.type for one in devices if one.type.partition("+")[0] not in there})
    if not missing:
        return (
            "no machine is usable: those that --types, --regions and --no-transfer allow were not "
            "measured, and their hardware is not similar to that of a measured one; omit some of "
            "these options"
        )
    return (
        f"no machine is usable: {catalogue.source} has no {' or '.join(missing)}, so price and "
        f"hardware are unknown ({nearest_types(missing[0], catalogue)}). "
        "Give a --catalog that contains it (a CSV of type,price is enough), or give the measured "
        "machine its name in the catalogue (evenstride profile --type, or --as)"
    )
