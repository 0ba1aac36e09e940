"""A thin library for benchmarks of torch.distributed that torchrun starts. See docs/library.md.

    errors   Refused, NotArrived and LostPeer, which the other modules raise
    join     join the job: the launcher's variables, the device, the rendezvous; and leave it
    groups   Job and Group: gather, broadcast, barrier; groups under test that cases share
    rpc      RPC over TensorPipe: roles, device maps, start and stop
    timing   the timed loop: a step and its parts in alternating blocks, and the stop rule
    stats    Estimate and Times: medians, means, ratios and differences with intervals (no torch)
    table    tables with as many columns as fit (no torch)

It raises exceptions: it never prints, never ends the process, and reads no flags.
"""
