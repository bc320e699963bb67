"""What the README states, measured: each command writes a JSON file under benchmarks/results/."""
