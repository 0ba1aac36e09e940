"""Runs of a benchmark: reading, evidence, verdicts, and the commands that ab.py runs."""
