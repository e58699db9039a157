"""Figures, verdicts and lines of the parts of `gpu.py` that need one card, without a device.

A part is right if its list ``wrong`` is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from evenstride.lab.doctor.bench_run import median_interval

Found = dict[str, Any]

BUSY_AIM = 0.03
"""How much a late peer may change busy times."""
WAIT_AIM = 0.05
"""How much added waits may differ from added delays."""
WORK_AIM = 0.8
"""Which part of the time without an engine a busy time must contain."""
SUM_AIM = 0.02
"""How much busy and waiting time may differ from the whole step."""
OWN_MS = 0.15
"""Own time in a step, apart from the marks of FSDP2's waits."""
MARKS_AIM = 0.01
"""What the marks may add to steps that the host makes slow."""
EXACT = 1e-10
"""Relative error of a gradient in float64."""
CLOSE = 1e-4
"""Difference of weights after a few steps. Libraries of a GPU add up in varying order."""


def waits_figures(found: Found) -> Found:
    """Return how a late peer changes the busy times and the waits that evenstride reads."""
    listed = found["blocks"]
    pairs = [
        sorted(pair, key=lambda block: bool(block["delayed"]))
        for pair in zip(listed[::2], listed[1::2], strict=True)
    ]
    read = [pair for pair in pairs if all(block["read_ms"] for block in pair)]
    if not read:
        return {"rounds": 0, "wrong": ["evenstride read no time"]}
    figures = {
        "rounds": len(read),
        "busy_ms": median(_busy(prompt) for prompt, _ in read),
        "busy_ratio": ratios([_busy(late) / _busy(prompt) for prompt, late in read]),
        "added_wait_ms": median(_wait(late) - _wait(prompt) for prompt, late in read),
        "added_step_ms": median(late["step_ms"] - prompt["step_ms"] for prompt, late in read),
        "held_ms": median(late["held_ms"] for _, late in read),
        "held_once_ms": median(late["held_once_ms"] for _, late in read),
        "parts_of_step": median(
            (_busy(block) + _wait(block)) / block["step_ms"] for pair in read for block in pair
        ),
        "alone_ms": found["alone_ms"],
        "frames": found["frames"],
    }
    return {**figures, "wrong": _wrong_waits(found["how"], figures)}


def _busy(block: Found) -> float:
    return float(median(busy_ms for busy_ms, _ in block["read_ms"]))


def _wait(block: Found) -> float:
    return float(median(wait_ms for _, wait_ms in block["read_ms"]))


def _wrong_waits(how: str, figures: Found) -> list[str]:
    wrong, added_ms = [], figures["added_wait_ms"]
    if abs(figures["busy_ratio"]["ratio"] - 1.0) > BUSY_AIM:
        wrong.append("a late peer changes the busy time")
    if abs(added_ms / figures["added_step_ms"] - 1.0) > WAIT_AIM:
        wrong.append("the wait does not grow by as much as the step")
    # DDP's one delay comes after the last gradient. Some of FSDP2's overlap with work.
    least_ms = figures["held_ms" if how.startswith("ddp") else "held_once_ms"]
    if not (1 - WAIT_AIM) * least_ms <= added_ms <= (1 + WAIT_AIM) * figures["held_ms"]:
        wrong.append("the wait does not grow by the delay")
    # A compiled model may take less time than the plain one.
    if not how.endswith("compiled") and figures["busy_ms"] < WORK_AIM * figures["alone_ms"]:
        wrong.append("work is missing from the busy time")
    if abs(figures["parts_of_step"] - 1.0) > SUM_AIM:
        wrong.append("busy and waiting time do not add up to the step")
    if how.endswith("compiled") and not figures["frames"]["all"]:
        wrong.append("torch compiled nothing")
    if figures["frames"]["of evenstride"]:
        wrong.append("torch compiled functions of evenstride")
    return wrong


def ratios(values: Sequence[float]) -> Found:
    """Return the median of ratios of paired blocks, with its 95 % interval."""
    return {"ratio": float(np.median(values)), "interval": median_interval(values)}


def price_figures(found: Found) -> Found:
    """Return what evenstride adds to a step of the host, by the number of FSDP2's groups."""
    groups, wrong = dict[str, Found](), list[str]()
    for number, one in found["by_groups"].items():
        plain_ms = median(one["later"]["plain"])
        control = _against_plain(one["later"], "again")
        ratio = _against_plain(one["later"], "evenstride")
        limit = MARKS_AIM + OWN_MS / plain_ms
        over = ratio["interval"][0] - control["ratio"] > limit
        met = ratio["interval"][1] - control["ratio"] <= limit
        groups[number] = {
            "plain_ms": plain_ms,
            "ratio": ratio,
            "control": control,
            "always_ratio": _against_plain(one["always"], "evenstride"),
            "always_us": 1e3 * _added_ms(one["always"]),
            "own_ms": 1e3 * one["own_s"],
            "limit": 1.0 + limit,
            "verdict": "OVER" if over else "met" if met else "unresolved",
        }
        if over:
            wrong.append(f"evenstride takes too long with {number} groups")
    return {"by_groups": groups, "us_per_group": _growth(groups), "wrong": wrong}


def _against_plain(times_ms: dict[str, list[float]], name: str) -> Found:
    return ratios([a / b for a, b in zip(times_ms[name], times_ms["plain"], strict=True)])


def _added_ms(times_ms: dict[str, list[float]]) -> float:
    pairs = zip(times_ms["evenstride"], times_ms["plain"], strict=True)
    return median(ours - plain for ours, plain in pairs)


def _growth(groups: dict[str, Found]) -> float | None:
    """Return the slope of the line through the added times by number of groups, if there is one."""
    if len(groups) < 2:
        return None
    counts = [int(number) for number in groups]
    return float(np.polyfit(counts, [one["always_us"] for one in groups.values()], 1)[0])


def features_figures(found: Found) -> Found:
    """Return for each feature what is wrong; empty if it did what it should."""
    seen = {name: _judged(name, one) for name, one in found["features"].items()}
    wrong = [f"{name}: {what}" for name, list_ in seen.items() for what in list_]
    return {"features": seen, "wrong": wrong}


def _judged(name: str, one: Found) -> list[str]:
    if "failed" in one:
        return [f"it raised {one['failed'].strip().splitlines()[-1]}"]
    return [text for text, right in _EXPECTED[name](one).items() if not right]


def _sizes(one: Found) -> dict[str, bool]:
    first, *later = one["last_steps"]
    return {
        "the run's first step is modelled": 0 not in one["modelled"],
        "the first step at a new size is modelled": first not in one["modelled"],
        "a later step at that size is not modelled": set(later) <= set(one["modelled"]),
    }


def _memory(one: Found) -> dict[str, bool]:
    failed, *sizes = one["sizes"]
    return {
        "the batch fitted, so nothing was tried": failed == 0,
        "the samples did not come again in smaller batches": (
            sum(sizes) == one["batch"] and max(sizes) < one["batch"]
        ),
        "the gradient is not that of the whole batch": one["error"] <= EXACT,
    }


def _checkpoint(one: Found) -> dict[str, bool]:
    return {
        "the restored run is at another step": one["restored_at"] == one["saved_at"],
        "the new run had the saved weights already": one["fresh_differs"] > 0,
        "the restored weights differ": one["weights_differ"] == 0,
        "the next step differs": one["next_differs"] <= CLOSE,
    }


def _mean(one: Found) -> dict[str, bool]:
    return {"the mean is wrong": np.allclose(one["means"], one["expected"], rtol=1e-6)}


def _precision(one: Found) -> dict[str, bool]:
    *finite, last = one["losses"]
    return {
        "the weights differ from those without evenstride": one["weights_differ"] <= CLOSE,
        "the losses are not finite": bool(np.isfinite(finite).all()),
        "the last loss is finite": not np.isfinite(last),
        "the skipped step does not count": one["committed"] == len(one["losses"]),
        "the scaler has not halved its scale": one["scale"] == 128.0,
    }


def _graph(one: Found) -> dict[str, bool]:
    return {
        "the weights differ from those without a graph": one["weights_differ"] <= CLOSE,
        "evenstride read no time": bool(one["modelled"]),
    }


def _whole_graph(one: Found) -> dict[str, bool]:
    return {"a captured step is not refused": "make_graphed_callables" in one["error"]}


_EXPECTED: dict[str, Callable[[Found], dict[str, bool]]] = {
    "sizes": _sizes,
    "sizes compiled": _sizes,
    "memory": _memory,
    "checkpoint": _checkpoint,
    "mean": _mean,
    "precision": _precision,
    "graph": _graph,
    "whole graph": _whole_graph,
}


def waits_lines(_: Found, figures: Found) -> list[str]:
    """Return the lines of a launch of part ``waits``."""
    if not figures["rounds"]:
        return [_verdict(figures)]
    return [
        f"busy {figures['busy_ms']:.3f} ms (the net alone {figures['alone_ms']:.3f} ms); with a "
        f"late peer times {in_words(figures['busy_ratio'])}",
        f"delays of {figures['held_ms']:.3f} ms per step add {figures['added_wait_ms']:.3f} ms of "
        f"waiting and {figures['added_step_ms']:.3f} ms of time; compiled "
        f"{figures['frames']['all']} functions, {figures['frames']['of evenstride']} of evenstride",
        _verdict(figures),
    ]


def price_lines(_: Found, figures: Found) -> list[str]:
    """Return the lines of a launch of part ``price``."""
    rows = [
        f"{number:>2} groups: plain {one['plain_ms']:.3f} ms, evenstride times "
        f"{in_words(one['ratio'])}, A/A {in_words(one['control'])}, limit {one['limit']:.4f}: "
        f"{one['verdict']}; all waits marked times {in_words(one['always_ratio'])}, "
        f"{one['always_us']:.0f} us more; own time {one['own_ms']:.3f} ms"
        for number, one in figures["by_groups"].items()
    ]
    if figures["us_per_group"] is not None:
        rows.append(f"marking all waits takes {figures['us_per_group']:.1f} us for each group")
    return [*rows, _verdict(figures)]


def features_lines(found: Found, figures: Found) -> list[str]:
    """Return the lines of the launch of part ``features``."""
    rows = []
    for name, one in found["features"].items():
        said = "; ".join(figures["features"][name]) or "right"
        shown = ", ".join(
            f"{key} {_shown(value)}" for key, value in one.items() if key not in ("failed", "error")
        )
        rows.append(f"{name:15} {said} ({shown})")
    return [*rows, _verdict(figures)]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def in_words(one: Found) -> str:
    """Return a ratio with its interval."""
    return f"{one['ratio']:.4f} (95 % {one['interval'][0]:.4f} to {one['interval'][1]:.4f})"


def _verdict(figures: Found) -> str:
    return f"WRONG: {'; '.join(figures['wrong'])}" if figures["wrong"] else "as expected"
