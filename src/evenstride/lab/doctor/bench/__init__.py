"""What ``evenstride doctor --bench`` measures: exactness, timing, balance and overhead.

Start with `bench_run`.
"""
