"""A shell on a Slurm cluster: `sudo python tests/support/slurm [COMMAND …]`."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.slurm import cluster, hosts

with cluster.SlurmCluster() as slurm:
  command = hosts.on_host(slurm.keeper_pid, *(sys.argv[1:] or ["bash"]))
  code = subprocess.run(command, env=slurm.environment()).returncode
sys.exit(code)
