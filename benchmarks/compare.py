#!/usr/bin/env python3
"""Is TEST slower than BASE, faster, the same, or can these reports not tell?

    ratio     time of TEST / time of BASE: the median of each run, averaged over the runs of a side
    verdict   slower, faster   the 95 % interval excludes 1 and the ratio is beyond --margin
              same             the interval lies within --margin
              undecided        neither: more runs would tell

    python benchmarks/compare.py base.json --test test.json
    python benchmarks/compare.py base/*.json --test test/*.json --margin 3% --fail-on slower

Written for this project. BSD-3-Clause.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("base", nargs="*", metavar="BASE", help="reports, folders of reports, or patterns")
    add("--test", nargs="+", metavar="TEST", help="the same, of what is compared with BASE")
    add(
        "--margin",
        type=cli.percentage,
        default=0.02,
        metavar="P",
        help="the smallest change that matters (default: 2%%)",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    ARGS = parse_args()  # before the imports below, so that --help need not wait for them

from common.compare import compare
from common.runs import find_reports, load_run


def main(args: argparse.Namespace) -> int:
    base, test = (
        [load_run(path) for path in find_reports(words)] for words in (args.base, args.test)
    )
    for case in compare(base, test, args.margin).cases:
        print(f"{case.label}: {case.ratio:.3f}, {case.verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main(ARGS))
