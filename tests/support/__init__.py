"""What tests share: small models and runs, processes, a Slurm cluster, comparisons."""
