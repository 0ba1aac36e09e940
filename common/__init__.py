"""What stands behind the scripts. A map, from the ground up; each line imports those above it.

Ground: needs the standard library only, so that analysis/ can use it.
    report      the file that --json writes: Estimate, Case, Report, load
    cli         command lines: Parser, types of flags, the flags of all scripts, how to say no
    contents    hashes of scripts, the harness and one's own models

Core: what stands behind every measuring script.
    stats       medians and differences with intervals, Times: numpy
    cpu_load    CPU use by other processes: psutil
    table       columns and rows as they come
    groups      Job, Group; process groups of a case; gather, share, agree
    timing      Workload, the timed loop, the stop rule
    join        how a process joins the job: variables, device, rendezvous, interface
    environment what the numbers were measured on, who else uses the cores; the preamble
    watchdog    hang detection, failed cases, signals
    benchmark   Benchmark: cases one after the other, each a row and a line of the report; Observer
    check       replicas bit by bit, relative errors
    memory      the largest memory in use
    rpc         names, device maps, settings of TensorPipe, start and shutdown

common/observe/ looks on: hints, GPUs and networks, traces, the line on a terminal. Without it a run
measures the same.
"""

import sys

from common import cli

sys.excepthook = cli.name_missing_package
