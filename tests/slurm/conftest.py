"""The fixture of tests that type commands on a cluster."""

from support.slurm.cli import cli  # noqa: F401
