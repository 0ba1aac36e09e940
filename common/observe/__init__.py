"""Observers of a run. Without this folder a run measures the same.

Each module here has a class that derives from `common.benchmark.Observer`. Benchmark creates one
instance of each.
"""
