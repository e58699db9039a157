"""Where the leader tells what it knows while a run goes on: CSV, TensorBoard, Prometheus."""
