"""Growing sets of ranks: how a sweep walks from one device to the whole job."""


def world_sizes(world_size: int, local_world_size: int) -> list[int]:
    """1, 2, 4, ... ranks of one node, then 1, 2, 4, ... whole nodes, and the whole world."""
    sizes = {world_size, min(local_world_size, world_size)}
    for unit, limit in ((1, local_world_size), (local_world_size, world_size)):
        size = unit
        while size <= min(limit, world_size):
            sizes.add(size)
            size *= 2
    return sorted(sizes)


def label_of(world_size: int, local_world_size: int) -> str:
    """`2M/8G`: 2 machines with 8 devices each. Uneven: `2M/12G in all`."""
    if world_size <= local_world_size:
        return f"1M/{world_size}G"
    machines = -(-world_size // local_world_size)
    if world_size % local_world_size == 0:
        return f"{machines}M/{local_world_size}G"
    return f"{machines}M/{world_size}G in all"
