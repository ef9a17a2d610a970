"""Helpers of tests: small models and runs, processes, a Slurm cluster, comparisons."""
