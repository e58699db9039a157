"""Where the leader tells what it knows while a run goes on: CSV, TensorBoard, Prometheus.

Start with `telemetry_board`; `METRICS` in `snapshot` is the table of all numbers.
"""
