"""Studies of many runs: batch sizes, time to accuracy."""
