"""What looks on while a script measures. Without this folder a run measures the same.

Each module here has a class that derives from `common.benchmark.Observer`. Benchmark makes one of
each.
"""
