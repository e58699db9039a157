"""A trace in which everything that may hold text holds something hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.report_runs import Made, make

MARKER = "hostile"
TEXTS = (
    f"<script>window.{MARKER}=1</script>",
    f'"><img src=x onerror="window.{MARKER}=1"><a href=\'http://example.com/{MARKER}\'>',
    f"</script></title></style><iframe src=//example.com/{MARKER}></iframe><!--",
    f"\x1b]0;{MARKER}\x07\x1b[31m\u202e{MARKER}\u2066",
    f"<style>@import url(http://example.com/{MARKER}.css)</style>{{{{7*7}}}}",
)


def hostile_trace(path: Path) -> Path:
    """Write a trace of 60 steps, then make all of its texts hostile; return its path."""
    names = tuple(f"{text}/{n}" for n, text in enumerate(TEXTS[:3]))
    make(Made(60, names=names, evaluated=20, header={TEXTS[1]: TEXTS[0], "sync": "bsp"}), path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for number, record in enumerate(records):
        _spoil(record, TEXTS[number % len(TEXTS)])
    for text in TEXTS:
        records.append({"kind": "alert", "worker": text, "step": 3, "reason": text})
        records.append({"kind": "alert", text: text})
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def _spoil(record: dict[str, Any], text: str) -> None:
    if record["kind"] == "metric":
        record["name"] = text
    elif record["kind"] == "header":
        record["evenstride"] = text
    for instruction in record.get("instructions", []):
        if "reason" in instruction:
            instruction["reason"] = text
