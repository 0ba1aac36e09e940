"""--expect-network: the network that the groups under test have to use."""

from collections.abc import Sequence

from harness import cli


def add_flag(parser: cli.Parser) -> None:
    parser.add_argument(
        "--expect-network",
        metavar="NAME",
        help="exit with status 1 unless all ranks use this network: with NCCL e.g. IB, Socket or "
        "the name of a plugin, with gloo an interface such as eth0",
    )


def unexpected(networks: Sequence[str], expected: str | None) -> str:
    """Why the networks are not the expected one; "" if they are, or if none is expected.

    networks: of each rank, beginning with the name; empty if unknown.
    """
    if not expected:
        return ""
    begin = f"expected --expect-network {expected}"
    if not any(networks):
        return f"{begin}, but the network is unknown: NCCL_DEBUG must not be set"
    for rank, network in enumerate(networks):
        name = network.partition(" (")[0].partition(",")[0]
        if name.casefold() != expected.casefold():
            return f"{begin}, got {network or 'an unknown one'} on rank {rank}"
    return ""
