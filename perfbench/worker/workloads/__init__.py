"""What a cell runs: the step of each workload, built from its axes."""
