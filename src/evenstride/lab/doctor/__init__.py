"""What this machine and its process group can do: devices, bandwidth, open ports, benches.

Start with `checkup`; `bench_run` measures what evenstride brings and costs here.
"""
