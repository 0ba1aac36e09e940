"""What replay.py, traffic.py and analysis/ read: files that users name, traces, and times.

Needs no torch. The run of many cases, harness/, does not use it.
"""
