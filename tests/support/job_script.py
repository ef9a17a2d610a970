"""Runs of every kind of job script, and fake commands of Slurm."""

from pathlib import Path

from jaxscale.jobs import spec
from jaxscale.jobs.site import Site, load_site

PLACES = dict(name="digits-1", folder="/runs/digits-1", cwd="/home/me/jaxscale")
PLACES |= dict(config="code/configs/digits.py", python="/venv/bin/python")
AGAIN = dict(requeue=10, made_by="jaxscale submit --config configs/digits.py")
ALONE = dict(nodes=1, site=Site(), preflight=False, overrides={}, trials=(), at_most=0)
RUN = spec.JobSpec(executor="slurm", **PLACES, **AGAIN, **ALONE)
HARD = {"epochs": "90", "data.path": "/data/with space"}
TRIALS = {"seed": "1", "optimizer.lr": "0.1"}, {"seed": "2", "optimizer.lr": "0.2"}


def at(site, **changes):
  return RUN._replace(site=load_site(f"launch/profiles/{site}.toml"), **changes)


RUNS = {
  "plain": RUN,
  "gpus": at("gpu8", nodes=64, overrides=HARD, preflight=True),
  "sweep": RUN._replace(trials=TRIALS, at_most=2, requeue=0),
  "apptainer": at("apptainer"),
  "spares": RUN._replace(nodes=4, spares=2, site=Site(tasks_per_node=2)),
  "pyxis": at("pyxis", nodes=2),
}


def fake(path: Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!/bin/bash\n{text}\n")
  path.chmod(0o755)
