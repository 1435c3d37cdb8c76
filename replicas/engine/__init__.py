"""What runs a step: schedule, copy, compute, sample, update."""
