"""The page of the comparison, from its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import Any

Stored = dict[str, Any]
FEWEST_REPEATED = 2

HEAD = """# Compared with other systems

<!-- Written by `python benchmarks/peers/compare_peers.py --page` from `results.json`. -->

All systems train the same network on the same data with the same global batch ({batch} samples) and
optimizer, on three workers under the same CPU limits, on a machine of two cores. Each has a virtual
environment of its own, and an adapter that follows its documentation. They run one after the other
in each round. Before and after each block, all workers train alone at the same time. *Share* refers
to the sum of these speeds. Run on {date} with torch {torch}.

```sh
python benchmarks/peers/compare_peers.py --prepare
python benchmarks/peers/compare_peers.py --minutes 40
python benchmarks/peers/compare_peers.py --page
```

A cell has the mean of its rounds, and their range where there are several. A block is *disturbed*
if the sum of speeds changed by more than 10 % from before to after it. Disturbed blocks are
repeated once. A figure with * is from disturbed blocks alone.
"""

UNEVEN_TEXT = """
## Unequal workers

Workers of 1, 0.5 and 0.2 of a core. *To loss* is the time from the first step until the mean
training loss of an epoch is at most {goal_loss}. Then the fastest and the slowest worker swap their
speeds. *Lost* is the work lost in the next 10 s, compared with the speed before, in seconds.
"""
EQUAL_TEXT = """
## Equal workers

Three workers of half a core. *To DDP* compares the shares in the same run, and has
DDP's mark as well.
"""
GRADIENT_TEXT = """
## Gradients of uneven batches

*By hand*: the relative error of the second gradient if the user gives the workers 7, 4 and 1
samples, compared with the gradient of all 12. *Tail*: that of the last gradient of an epoch of 29
samples with batches of 24, compared with the gradient of the samples that were left. *Repeated*
counts the samples of this epoch that were used more than once.
"""
DEATH_TEXT = """
## A worker is killed

One of three equal workers ends by SIGKILL. *Lost* is the time until the next update, less the usual
time of one. If the survivors end or hang for 30 s, all workers are started again at once, and the
start is part of the time. A launcher such as torchrun adds its own delays. So does the work since
the last checkpoint; no system writes one here.
"""
NOTES = """
## How the systems are set up

- **DDP, Accelerate, Lightning, torchft**: each worker has an equal batch, which is their default.
- **AdaptDL** 0.2.11 gives all replicas the same batch. `adaptdl-autoscale` may enlarge the global
  batch up to four times.
- **hivemind** 1.1.12 accumulates gradients towards the global batch in steps of a quarter of an
  equal share, with a matchmaking time of 1 s. It is made for much larger batches, so `hivemind-10`
  has a ten times larger one, with the same learning rate. Its peers have no common epochs. A sample
  counts when a peer has processed it.
- **dbs** and **omnilearn** follow the public scripts of DBS and OmniLearn: batches change once per
  epoch. The scripts are in no package registry, so the algorithms are written again.
- **evenstride** runs `adaptive` on DDP; where the user sets sizes, it runs `static`.
  `evenstride-live` runs on torchft, where survivors continue.
"""


def page(stored: Stored) -> str:
    """Return the page of a file's results."""
    blocks = stored.get("blocks", [])
    parts = [
        HEAD.format(**stored),
        section(UNEVEN_TEXT.format(**stored), uneven_rows(blocks), UNEVEN_HEADINGS),
        section(EQUAL_TEXT, equal_rows(blocks), ("system", "samples/s", "share", "to DDP")),
        section(GRADIENT_TEXT, gradient_rows(blocks), GRADIENT_HEADINGS),
        section(DEATH_TEXT, death_rows(blocks), ("system", "lost", "the survivors")),
        failures(stored),
        NOTES,
    ]
    return "".join(parts)


UNEVEN_HEADINGS = (
    *("system", "samples/s", "share", "to loss"),
    *("share after the swap", "lost", "blocks", "disturbed"),
)
GRADIENT_HEADINGS = ("system", "by hand", "tail", "repeated")


def section(text: str, rows: Sequence[tuple[str, ...]], headings: tuple[str, ...]) -> str:
    """Return a section with a table; nothing without rows."""
    if not rows:
        return ""
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join([text, *(f"| {' | '.join(line)} |" for line in lines), ""])


def chosen(blocks: Sequence[Stored], peer: str, measure: str) -> tuple[list[Stored], str]:
    """Return the blocks to use, undisturbed ones if possible, and a mark otherwise."""
    ours = [
        one
        for one in blocks
        if one["peer"] == peer and one["measure"] == measure and one["figures"] is not None
    ]
    quiet = [one for one in ours if not one["disturbed"]]
    return (quiet, "") if quiet else (ours, "*" if ours else "")


def peers_of(blocks: Sequence[Stored], *measures: str) -> list[str]:
    """Return the systems with any block of some measures, in the order of the file."""
    return list(dict.fromkeys(one["peer"] for one in blocks if one["measure"] in measures))


def share(block: Stored, name: str = "samples_per_s") -> float:
    """Return a block's samples per second as a part of the sum of the workers' speeds."""
    total = mean(block["sums"])
    return float(block["figures"][name] / total) if total else 0.0


def spread(values: Sequence[float | None], shape: Callable[[float], str], mark: str = "") -> str:
    """Return the mean of some values, and their range where there are several."""
    known = [value for value in values if value is not None]
    if not values:
        return "failed"
    if len(known) < len(values):
        return f"not in {len(values) - len(known)} of {len(values)}{mark}"
    text = shape(mean(known)) + mark
    if len(known) >= FEWEST_REPEATED:
        text += f" ({shape(min(known))} to {shape(max(known))})"
    return text


def percent(value: float) -> str:
    """Return a share."""
    return f"{value:.0%}".replace("%", " %")


def seconds(value: float) -> str:
    """Return a time."""
    return f"{value:.1f} s"


def error(value: float) -> str:
    """Return a relative error."""
    return f"{value:.3f}" if value >= 1e-3 else f"{value:.0e}"


def uneven_rows(blocks: Sequence[Stored]) -> list[tuple[str, ...]]:
    """Return the rows on unequal workers, the largest share first."""
    found = []
    for peer in peers_of(blocks, "uneven"):
        ours, mark = chosen(blocks, peer, "uneven")
        figures = [one["figures"] for one in ours]
        every = [one for one in blocks if one["peer"] == peer and one["measure"] == "uneven"]
        row = (
            peer,
            spread([one["samples_per_s"] for one in figures], lambda x: f"{x:.0f}", mark),
            spread([share(one) for one in ours], percent, mark),
            spread([one["to_loss_s"] for one in figures], seconds, mark),
            spread([share(one, "swap_samples_per_s") for one in ours], percent, mark),
            spread([one["swap_lost_s"] for one in figures], seconds, mark),
            f"{len(every)}",
            f"{sum(one['disturbed'] for one in every)}",
        )
        found.append((-mean(share(one) for one in ours) if ours else 0.0, row))
    return [row for _, row in sorted(found)]


def equal_rows(blocks: Sequence[Stored]) -> list[tuple[str, ...]]:
    """Return the rows on equal workers."""
    plain, doubt = chosen(blocks, "ddp", "equal")
    found = list[tuple[str, ...]]()
    for peer in peers_of(blocks, "equal"):
        ours, mark = chosen(blocks, peer, "equal")
        rates = [one["figures"]["samples_per_s"] for one in ours]
        shares = [share(one) for one in ours]
        base = mean(share(one) for one in plain) if plain else None
        relative = [one / base for one in shares] if base else []
        row = (
            peer,
            spread(rates, lambda x: f"{x:.0f}", mark),
            spread(shares, percent, mark),
            spread(relative, lambda x: f"{x:.2f}", mark or doubt) if base else "",
        )
        found.append(row)
    return found


def gradient_rows(blocks: Sequence[Stored]) -> list[tuple[str, ...]]:
    """Return the rows on gradients; empty cells where a measure means nothing."""
    found = []
    for peer in peers_of(blocks, "by-hand", "tail"):
        cells = [peer]
        for measure, name in (("by-hand", "error"), ("tail", "error"), ("tail", "repeated")):
            ours, _ = chosen(blocks, peer, measure)
            tried = peer in peers_of(blocks, measure)
            values = [one["figures"][name] for one in ours]
            shape = error if name == "error" else "{:.0f}".format
            cells.append(spread(values, shape) if tried else "")
        found.append(tuple(cells))
    return found


def death_rows(blocks: Sequence[Stored]) -> list[tuple[str, ...]]:
    """Return the rows on a killed worker."""
    found = list[tuple[str, ...]]()
    for peer in peers_of(blocks, "death"):
        ours, _ = chosen(blocks, peer, "death")
        how = dict.fromkeys(one["figures"]["how"] for one in ours)
        lost = spread([one["figures"]["lost_s"] for one in ours], seconds)
        found.append((peer, lost, ", ".join(WAYS[each] for each in how)))
    return found


WAYS = {
    "continues": "continue",
    "ends": "end, and all are started again",
    "hangs": "hang, and all are started again",
}


def failures(stored: Stored) -> str:
    """Return what failed, with its error."""
    lines = list(dict.fromkeys(failure_lines(stored)))
    if not lines:
        return ""
    return "\n## What failed\n\n" + "\n".join(lines) + "\n"


def failure_lines(stored: Stored) -> Iterator[str]:
    """Yield a line for each failure."""
    for name, words in stored.get("installs", {}).items():
        yield f"- **{name}** could not be installed: `{shortened(words)}`"
    for one in stored.get("blocks", []):
        if one["error"] is not None:
            yield f"- **{one['peer']}**, {one['measure']}: `{shortened(one['error'])}`"


def shortened(words: str, most: int = 80) -> str:
    """Return words without what breaks a line of the page."""
    plain = " ".join(words.replace("`", "'").split())
    return plain if len(plain) <= most else f"{plain[: most - 3]}..."
