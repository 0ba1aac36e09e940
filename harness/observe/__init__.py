"""Observers of a run. Each module has a class that derives from `harness.benchmark.Observer`."""
