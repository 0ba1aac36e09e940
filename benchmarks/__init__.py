"""One script per question. A package, so that no installed `benchmarks` takes its name."""
