"""Imports go down only, and no file grows past what one can hold in mind."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "jaxscale"

LEVELS = {
  "report": 17,
  "launch": 16, "batch_study": 16, "time_to_accuracy": 16,
  "trials": 15,
  "train": 14, "generate": 14, "fits": 14, "doctor": 14, "plot_schedule": 14,
  "run": 13, "stage_loop": 12.5, "joining": 1.5, "imagenet": 13, "preflight": 13,
  "events": 12,
  "reporter": 11, "describe": 11, "adaptive": 11, "workdir": 11, "step_report": 11,
  "build": 10, "export": 10,
  "parts": 9, "exchange_parts": 9, "layout_parts": 9,
  "derive": 8,
  "spread": 7,
  "loop": 5, "checkpoint": 5, "trained": 5, "described": 5, "stand_in": 5, "beside": 5,
  "in_flight": 1, "checkpoint_files": 3, "checkpoint_dir": 4,
  "local_step": 5,
  "weights": 5,
  "refusals": 6,
  "step": 4, "carry_over": 4, "replicas": 4,
  "state": 3, "damage": 3,
  "losses": 2, "checksum": 2, "data": 2, "lease": 2,
  "exchange": 2, "non_finite": 2, "parallel": 2.5,
  "mesh": 1, "collectives": 1, "optim": 1, "models": 1, "metrics": 1, "cluster": 1,
  "holder": 1,
  "stages": 1, "noise_scale": 1, "scaling": 1,
  "config": 0, "settings": 0, "overrides": 0, "exits": 0, "findings": 0, "paths": 0,
  "simulated": 0,
}  # fmt: skip
# Within a level nothing imports another; level 0 is ordered by itself.
WITHIN = {
  ("collectives", "mesh"),
  ("collectives", "cluster"),
  ("config", "settings"),
  ("exchange_parts", "parts"),
  ("exits", "settings"),
  ("findings", "exits"),
  ("overrides", "config"),
  ("overrides", "settings"),
}
READS_CONFIG = {
  "derive", "parts", "exchange_parts", "layout_parts", "build", "run", "adaptive",
  "overrides", "joining", "stage_loop", "launch", "trials", "plot_schedule",
  "batch_study", "time_to_accuracy", "generate", "fits", "export", "described",
  "stand_in", "beside",
}  # fmt: skip

FILES = [p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py"]


def module_of(path: Path) -> str:
  return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
  """The modules of jaxscale that a file imports, anywhere in it."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module == "jaxscale":
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
      "jaxscale."
    ):
      found.add(node.module.split(".")[1])
    elif isinstance(node, ast.Import):
      found |= {
        a.name.split(".")[1] for a in node.names if a.name.startswith("jaxscale.")
      }
  return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path):
  here = module_of(path)
  for other in imports(path) - {here}:
    lower = LEVELS[other] < LEVELS[here] or (here, other) in WITHIN
    assert lower, f"{here} must not import {other}"
  if "config" in imports(path) - {here}:
    assert here in READS_CONFIG, f"{here} must take plain arguments, not a Config"


def test_files_are_small():
  tracked = [*PACKAGE.rglob("*.py")]
  for folder in ("tests", "configs", "launch", "colabs", "benchmarks"):
    tracked += (PACKAGE.parent / folder).rglob("*.py")
  long = {str(p): n for p in tracked if (n := len(p.read_text().splitlines())) > 400}
  assert not long


def test_no_todo_is_left():
  for path in FILES:
    assert "TODO" not in path.read_text() and "FIXME" not in path.read_text()
