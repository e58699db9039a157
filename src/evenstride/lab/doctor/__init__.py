"""Report on a machine and its process group: devices, bandwidth, open ports, benchmarks.

Start with `checkup`. `bench_run` measures the speed-up and the overhead of evenstride.
"""
