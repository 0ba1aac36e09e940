"""What p2p_matrix.py shows of its links: matrices, the worst, heat maps, and what is slow."""

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from common import links
from common.links import Pair
from common.results import Case

LARGEST_MATRIX = 32  # above, the worst links and the medians of nodes are printed
WORST = 20

Link = tuple[int, int, float, float, float, float]  # a, b, latency, a->b, b->a, both

# what is measured: its column in a Link (of a -> b, of b -> a), unit, and whether less is better
KINDS = {
    "latency": ((2, 2), "us", True),
    "bandwidth, row sends to column": ((3, 4), "GB/s", False),
    "bidirectional bandwidth": ((5, 5), "GB/s", False),
}


def all_links(cases: list[Case]) -> list[Link]:
    return [tuple(link) for case in cases for link in case["metrics"].get("links", [])]


def directed(all_of: list[Link], kind: str) -> list[tuple[Pair, float]]:
    """((sender, receiver), value) of every link; once where there is no direction."""
    (there, back), _, _ = KINDS[kind]
    found = [((link[0], link[1]), link[there]) for link in all_of]
    if back != there:
        found += [((link[1], link[0]), link[back]) for link in all_of]
    return found


def verdicts(
    all_of: list[Link], nodes: list[int], args: argparse.Namespace, hosts: Sequence[str] = ()
) -> list[str]:
    """A line for each member and link that is slower than its like.

    nodes: of each member. hosts: likewise, their names; named with the member if there are several.
    """
    of_node = dict(zip(nodes, hosts, strict=False)) if len(set(hosts)) > 1 else {}

    def host(node: int) -> str:
        return f" ({of_node[node]})" if node in of_node else ""

    lines = []
    what = args.by
    for kind in KINDS:
        less = KINDS[kind][2]
        for inside in (True, False):
            like = [
                ((a, b), value if less else 1 / value)
                for (a, b), value in directed(all_of, kind)
                if (nodes[a] == nodes[b]) == inside
            ]
            place = "within nodes" if inside else "between nodes"
            slow: list[links.Outlier] = []
            if not inside and what == "rank":  # a node is named before its ranks
                of_nodes = [((nodes[a], nodes[b]), cost) for (a, b), cost in like]
                bad = links.slow_members(of_nodes, args.sigmas)
                lines += [
                    f"slow node {o.name[0]}{host(o.name[0])}: {_words(o, kind, place)}" for o in bad
                ]
                names = {o.name[0] for o in bad}
                like = [(p, c) for p, c in like if not names & {nodes[p[0]], nodes[p[1]]}]
            slow = links.slow_members(like, args.sigmas)
            lines += [
                f"slow {what} {o.name[0]}{host(nodes[o.name[0]])}: {_words(o, kind, place)}"
                for o in slow
            ]
            for o in links.slow_links(like, slow, args.sigmas):
                arrow = "->" if KINDS[kind][0][0] != KINDS[kind][0][1] else "-"
                a, b = (f"{member}{host(nodes[member])}" for member in o.name)
                lines.append(f"slow link {a} {arrow} {b}: {_words(o, kind, place)}")
    return lines


def _words(outlier: links.Outlier, kind: str, place: str) -> str:
    far = (
        "beyond all deviation" if outlier.sigmas == float("inf") else f"{outlier.sigmas:.0f} sigmas"
    )
    return f"{kind.partition(',')[0]} {outlier.factor:.2f}x slower than the median {place} ({far})"


def matrix(all_of: list[Link], kind: str, n: int) -> Any:
    """[n, n], NaN where nothing was measured."""
    values = np.full((n, n), np.nan)
    for (a, b), value in directed(all_of, kind):
        values[a, b] = value
        if KINDS[kind][0][0] == KINDS[kind][0][1]:
            values[b, a] = value
    return values


def tables(all_of: list[Link], nodes: list[int], args: argparse.Namespace) -> str:
    """The matrices; of many members the worst links and each node's median."""
    n, lines = len(nodes), []
    for kind, (_, unit, less) in KINDS.items():
        lines.append(f"\n{kind} ({unit}), by {args.by}\n")
        if n <= LARGEST_MATRIX:
            values = matrix(all_of, kind, n)
            width = max(7, *(len(f"{v:.4g}") + 1 for v in values[~np.isnan(values)]))
            lines.append(" " * 5 + "".join(f"{b:>{width}}" for b in range(n)))
            for a in range(n):
                cells = ("-" if np.isnan(v) else f"{v:.4g}" for v in values[a])
                lines.append(f"{a:>4} " + "".join(f"{cell:>{width}}" for cell in cells))
            continue
        pairs = sorted(directed(all_of, kind), key=lambda pair: -pair[1] if less else pair[1])
        lines += [f"worst {WORST} of {len(pairs)} links:"]
        lines += [f"  {a:>5} -> {b:<5} {value:.4g}" for (a, b), value in pairs[:WORST]]
        lines.append("median of each node's links, within it and to others:")
        for node in dict.fromkeys(nodes):
            own = [(p, v) for p, v in pairs if node in (nodes[p[0]], nodes[p[1]])]
            parts = [
                [v for p, v in own if (nodes[p[0]] == nodes[p[1]]) == inside]
                for inside in (True, False)
            ]
            cells = (f"{median(part):.4g}" if part else "-" for part in parts)
            lines.append(f"  node {node:<5} {'  '.join(cells)}")
    return "\n".join(lines)


def plot(all_of: list[Link], n: int, args: argparse.Namespace, title: str) -> None:
    """Write the heat maps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(KINDS), figsize=(6 * len(KINDS), 5.5))
    for axis, (kind, (_, unit, less)) in zip(axes, KINDS.items(), strict=True):
        # yellow is good everywhere
        image = axis.imshow(matrix(all_of, kind, n), cmap="viridis_r" if less else "viridis")
        axis.set_title(f"{kind} ({unit})")
        axis.set_ylabel(f"{args.by} that sends")
        axis.set_xlabel(f"{args.by} that receives")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.yaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axis, shrink=0.8)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(args.plot, format="png")
    pyplot.close(figure)
