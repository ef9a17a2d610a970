"""A real Slurm cluster on this machine, and jobs on it."""
