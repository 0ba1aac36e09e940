"""The harness behind the scripts. In this map, each module imports only modules above it.

Shared with analysis/: runs without torch.
    report      the report that --json writes: Estimate, Case, Report, load
    cli         command lines: Parser, types of flags, the flags of all scripts, error messages
    contents    hashes of scripts, of the harness and of user-defined models
    stats       medians and differences with intervals, Times
    cpu_load    CPU use by other processes

Core: used by every measuring script.
    table       columns and rows, printed as cases finish
    groups      Job, Group, GroupCache: the process groups of cases; gather, broadcast
    timing      Workload, the timed loop, the stop rule
    join        joining the job: variables, device, rendezvous, network interface
    environment hardware, software and variables of a run; the preamble and its warnings
    watchdog    hang detection, failed cases, signals
    benchmark   Benchmark: measures cases, each a row of a table and a line of the report; Observer
    rpc         names, device maps and settings of TensorPipe; start and shutdown of RPC

common/observe/ adds hints, GPU and network counters, traces and the progress line. A run without
this folder measures the same.
"""
