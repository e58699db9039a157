"""Output of the leader's measurements during a run: CSV, TensorBoard, Prometheus.

Start with `telemetry_board`. `METRICS` in `snapshot` lists all metrics.
"""
