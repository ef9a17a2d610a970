"""MLPerf's own checker on our logs, as mlperf-logging is installed."""

import pytest

from jaxscale.run.fit import fit
from support.configs import tiny_digits
from support.mllog import LAMB, LARS, SGD, write_run

pytest.importorskip("mlperf_logging")


def compliance(path):
  """What the checker of MLPerf Training 4.0, ResNet's last round, finds wrong."""
  from mlperf_logging.compliance_checker import mlp_compliance

  checker = mlp_compliance.make_checker("training", "4.0.0", False, True)
  mlp_compliance.main(str(path), "training_4.0.0/common.yaml", checker)
  return [*checker.overwritable.values(), *checker.not_overwritable]


@pytest.mark.parametrize(
  "optimizer, division", [(LARS, "closed"), (SGD, "closed"), (LAMB, "open")]
)
def test_mlperfs_own_checker_finds_nothing_wrong(tmp_path, optimizer, division):
  write_run(tmp_path / "log", optimizer, [0.5, 0.7, 0.76], division)
  assert compliance(tmp_path / "log") == []


def test_mlperfs_own_checker_would_find_it(tmp_path):
  path = tmp_path / "log"
  write_run(path, LARS, [0.5, 0.7])
  assert "0.7590" in compliance(path)[0]
  write_run(path, LARS | {"weight_decay": 3e-4}, [0.76])
  assert "lars_opt_weight_decay" in compliance(path)[0]
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join(x for x in lines if "run_stop" not in x))
  assert any("run_stop" in problem for problem in compliance(path))


def test_it_finds_nothing_wrong_in_the_log_of_a_run_that_trained(tmp_path):
  target = {"target_accuracy": "0.1", "stop_at_target": "True"}
  fit(tiny_digits(log__mllog="True", epochs="2", **target), tmp_path)
  path = tmp_path / "mllog.txt"
  text = path.read_text()  # it knows no digits: so they are called one of its own
  path.write_text(text.replace('"value": "digits"', '"value": "resnet"', 1))
  assert compliance(path) == []


def test_the_reference_convergence_points_are_mlperfs():
  from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

  from jaxscale.studies.time_to_accuracy import REFERENCES

  theirs = RCP_Checker("training", "4.0.0", "resnet", False).rcp_data.values()
  assert {t["BS"] for t in theirs} == set(REFERENCES)
  for point in theirs:
    ours = REFERENCES[point["BS"]]
    assert ours.epochs == pytest.approx(point["RCP Mean"], abs=1e-3)
    assert ours.min_epochs == pytest.approx(point["Min Epochs"], abs=1e-3)
