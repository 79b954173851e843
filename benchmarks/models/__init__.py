"""Models beyond the papers', a file for each family; `benchmarks.workloads` has them by name."""
