"""A dashboard for Grafana over the metrics that the Prometheus sink serves, as data for JSON.

It has the numbers of ``evenstride top``: those of the run above, then the workers as a table and
over time. The format is that of `Grafana's dashboards <https://grafana.com/docs/grafana/latest/
visualizations/dashboards/build-dashboards/view-dashboard-json-model/>`_, schema version 39, which
Grafana 10.4 and later read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from evenstride.runtime.sinks.snapshot import BY_NAME, PREFIX

_SCHEMA = 39
_COLUMNS = 24  # of Grafana's grid
# A variable of the dashboard, so that one file suits every installation.
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SLOW, _LOW = 0.9, 0.7  # own speeds from which `evenstride top` has colours
_UNITS = {"s": "s", "bytes": "bytes", "samples": "none", "1": "none", "0 or 1": "none"}


class _Figure(NamedTuple):
    """A metric in a panel, and its name there; a worker or a mean is named by its label."""

    metric: str
    name: str = ""


class _Panel(NamedTuple):
    """A panel over its metrics; all panels of one height stand side by side."""

    kind: str  # stat, timeseries, state-timeline or table
    title: str
    figures: Sequence[_Figure]
    width: int
    height: int
    stacked: bool = False


# What `evenstride top` shows above its table of workers.
_NUMBERS = (
    _Panel("stat", "Step", [_Figure("step")], 3, 4),
    _Panel("stat", "Epochs", [_Figure("epochs")], 3, 4),
    _Panel("stat", "Time of a step", [_Figure("step_seconds")], 3, 4),
    _Panel("stat", "Global batch", [_Figure("global_batch_samples")], 3, 4),
    _Panel("stat", "Efficiency", [_Figure("efficiency_model_ratio")], 3, 4),
    _Panel("stat", "Times as fast as equal shares", [_Figure("speedup_model_ratio")], 3, 4),
    _Panel("stat", "Time saved", [_Figure("saved_model_seconds")], 3, 4),
    _Panel(
        "stat",
        "Changes, alerts",
        [_Figure("changes_total", "changes"), _Figure("alerts_total", "alerts")],
        3,
        4,
    ),
)
# The table of `evenstride top`, with its headings.
_WORKERS = _Panel(
    "table",
    "Workers",
    [
        _Figure("worker_share_samples", "share"),
        _Figure("worker_busy_seconds", "busy"),
        _Figure("worker_wait_seconds", "waits"),
        _Figure("worker_speed_ratio", "own speed"),
        _Figure("worker_caused_seconds", "others waited"),
        _Figure("worker_memory_peak_bytes", "memory"),
        _Figure("worker_memory_cap_samples", "memory cap"),
        _Figure("worker_slow", "slow"),
        _Figure("worker_unneeded", "unneeded"),
    ],
    24,
    8,
)
# What a terminal has no room for: how these numbers came about.
_OVER_TIME = (
    _Panel(
        "timeseries",
        "Time of a step: taken, and by the fitted curves",
        [
            _Figure("step_seconds", "taken"),
            _Figure("equal_step_model_seconds", "equal shares"),
            _Figure("best_step_model_seconds", "best shares"),
            _Figure("communication_seconds", "communication"),
        ],
        12,
        8,
    ),
    _Panel(
        "timeseries",
        "Gain so far",
        [
            _Figure("efficiency_model_ratio", "efficiency"),
            _Figure("speedup_model_ratio", "times as fast as equal shares"),
            _Figure("bound_model_ratio", "bound"),
        ],
        12,
        8,
    ),
    _Panel("timeseries", "Shares", [_Figure("worker_share_samples")], 12, 8, stacked=True),
    _Panel("timeseries", "Own speed", [_Figure("worker_speed_ratio")], 12, 8),
    _Panel("timeseries", "Busy, per step", [_Figure("worker_busy_seconds")], 8, 8),
    _Panel("timeseries", "Waiting, per step", [_Figure("worker_wait_seconds")], 8, 8),
    _Panel("timeseries", "Waiting for data, per step", [_Figure("worker_data_seconds")], 8, 8),
    _Panel("state-timeline", "Slow workers", [_Figure("worker_slow")], 12, 6),
    _Panel("timeseries", "Means that the script names", [_Figure("metric")], 12, 6),
    _Panel(
        "timeseries",
        "Gradient noise scale",
        [
            _Figure("gradient_noise_scale", "noise scale"),
            _Figure("gradient_noise_scale_low", "low end of 95 %"),
            _Figure("gradient_noise_scale_high", "high end of 95 %"),
            _Figure("global_batch_samples", "global batch"),
        ],
        12,
        8,
    ),
    _Panel("timeseries", "Highest memory peaks", [_Figure("worker_memory_peak_bytes")], 12, 8),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as JSON types.

    Its variables select the data source and the run, by the address that Prometheus scrapes.
    """
    return {
        "uid": "evenstride",
        "title": "evenstride",
        "description": "Shares, waiting times and speeds of the workers of a training run.",
        "tags": ["evenstride", "pytorch"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "graphTooltip": 1,  # one crosshair in all panels
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": _placed([*_NUMBERS, _WORKERS, *_OVER_TIME]),
    }


def _variables() -> list[dict[str, Any]]:
    runs = f"label_values({PREFIX}step, instance)"
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
        },
        {
            "name": "run",
            "label": "Run",
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": runs, "refId": "run"},
            "refresh": 2,  # when the time range changes
            "sort": 1,
        },
    ]


def _placed(panels: Sequence[_Panel]) -> list[dict[str, Any]]:
    """Return the panels in Grafana's grid, from left to right."""
    placed, x, y = [], 0, 0
    for number, panel in enumerate(panels, 1):
        place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
        placed.append({"id": number, "gridPos": place, **_drawn(panel)})
        x += panel.width
        if x >= _COLUMNS:
            x, y = 0, y + panel.height
    return placed


def _drawn(panel: _Panel) -> dict[str, Any]:
    table = panel.kind == "table"
    found: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "description": "; ".join(
            f"{one.name}: {BY_NAME[one.metric].means}" if one.name else BY_NAME[one.metric].means
            for one in panel.figures
        ),
        "datasource": _SOURCE,
        "targets": [_target(n, one, table=table) for n, one in enumerate(panel.figures)],
        "fieldConfig": _fields(panel),
        "options": {},
    }
    if panel.kind == "stat":
        found["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "auto"}
    if panel.kind == "timeseries":
        found["options"] = {"tooltip": {"mode": "multi", "sort": "desc"}}
    if table:
        found["transformations"] = _one_row_each(panel.figures)
    return found


def _target(number: int, figure: _Figure, *, table: bool) -> dict[str, Any]:
    metric = BY_NAME[figure.metric]
    legend = figure.name or (f"{{{{{metric.label}}}}}" if metric.label else metric.name)
    # A table shows the present only; without `range`, Grafana would ask for the past as well.
    how = {"format": "table", "instant": True, "range": False} if table else {"range": True}
    return {
        "refId": _letter(number),
        "datasource": _SOURCE,
        "expr": f'{PREFIX}{metric.name}{{instance="$run"}}',
        "legendFormat": legend,
        **how,
    }


def _letter(number: int) -> str:
    return chr(ord("A") + number)


def _fields(panel: _Panel) -> dict[str, Any]:
    """Return units, and what a panel of its kind draws."""
    unit = _UNITS.get(BY_NAME[panel.figures[0].metric].unit, "none")
    defaults: dict[str, Any] = {} if panel.kind == "table" else {"unit": unit}
    overrides: list[dict[str, Any]] = []
    if panel.kind == "timeseries":
        mode = "normal" if panel.stacked else "none"
        drawn = {"fillOpacity": 30 if panel.stacked else 0, "stacking": {"mode": mode}}
        defaults["custom"] = {**drawn, "showPoints": "never", "spanNulls": True}
    elif panel.kind == "table":
        for one in panel.figures:  # columns have units of their own
            known = {"id": "unit", "value": _UNITS[BY_NAME[one.metric].unit]}
            properties = [known, *_coloured(one.metric)]
            matcher = {"id": "byName", "options": one.name}
            overrides.append({"matcher": matcher, "properties": properties})
    return {"defaults": defaults, "overrides": overrides}


def _coloured(metric: str) -> list[dict[str, Any]]:
    """Return the colours of a column: those of own speeds in ``evenstride top``, and of alerts."""
    if metric == "worker_speed_ratio":
        steps = [("red", None), ("yellow", _LOW), ("green", _SLOW)]
    elif metric in ("worker_slow", "worker_unneeded"):
        steps = [("green", None), ("red", 1.0)]
    else:
        return []
    thresholds = [{"color": color, "value": value} for color, value in steps]
    return [
        {"id": "thresholds", "value": {"mode": "absolute", "steps": thresholds}},
        {"id": "custom.cellOptions", "value": {"type": "color-text"}},
    ]


def _one_row_each(figures: Sequence[_Figure]) -> list[dict[str, Any]]:
    """Return the transformations from a table for each metric to a row for each worker."""
    # Grafana names the column of a value after its query.
    names = {f"Value #{_letter(n)}": one.name for n, one in enumerate(figures)}
    hidden = dict.fromkeys(("Time", "__name__", "instance", "job"), True)
    order = {name: place for place, name in enumerate(["worker", *names])}
    organised = {"excludeByName": hidden, "renameByName": names, "indexByName": order}
    return [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": organised},
    ]
