"""Runs of every kind of job script, and fake commands of Slurm."""

from pathlib import Path

from jaxscale.jobs import spec
from jaxscale.jobs.site import Site, load_site

NAMES = dict(name="digits-1", folder="/runs/digits-1", cwd="/home/me/jaxscale")
CODE = dict(config="code/configs/digits.py", overrides={}, trials=(), python="/venv/bin/python")
JOB = dict(at_most=0, nodes=1, site=Site(), requeue=10, preflight=False, executor="slurm")
RUN = spec.JobSpec(**NAMES, **CODE, **JOB, made_by="jaxscale submit --config configs/digits.py")
RUNS = {
  "plain": RUN,
  "gpus": RUN._replace(
    nodes=64,
    overrides={"epochs": "90", "data.path": "/data/with space"},
    preflight=True,
    site=load_site("launch/profiles/gpu8.toml"),
  ),
  "sweep": RUN._replace(
    trials=({"seed": "1", "optimizer.lr": "0.1"}, {"seed": "2", "optimizer.lr": "0.2"}),
    at_most=2,
    requeue=0,
  ),
  "apptainer": RUN._replace(site=load_site("launch/profiles/apptainer.toml")),
  "spares": RUN._replace(nodes=4, spares=2, site=Site(tasks_per_node=2)),
  "pyxis": RUN._replace(site=load_site("launch/profiles/pyxis.toml"), nodes=2),
}


def fake(path: Path, text: str) -> None:
  path.parent.mkdir(exist_ok=True)
  path.write_text(f"#!/bin/bash\n{text}\n")
  path.chmod(0o755)
