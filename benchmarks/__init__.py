"""One script per question. A package, so that no installed `benchmarks` takes its name."""

import common  # noqa: F401  it names a package that is missing
