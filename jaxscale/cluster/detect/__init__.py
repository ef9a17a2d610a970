"""Where a process runs: Slurm, MPI, Kubernetes, TPU pods, or by itself."""
