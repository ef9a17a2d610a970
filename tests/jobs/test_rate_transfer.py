"""`jaxscale transfer`: the optimum, the rules by hand, the report of real runs, refusals."""

import dataclasses
import json
import re

import pytest

from jaxscale import cli
from jaxscale import config as cfg
from jaxscale.config.plain import to_plain
from jaxscale.config.record import FORMAT
from jaxscale.errors import ConfigError
from jaxscale.jobs.rate_transfer import optimum, settings
from support.configs import tiny_language

BASE = {"width": 16, "num_layers": 1, "hidden": 32}
DERIVED = {"peak_lr": 0.01, "total_steps": 100, "warmup_steps": 20}
HEAD = """from jaxscale.config import *


def get_config():
  return """


def small(**fields):
  usual = dict(parametrization=cfg.CompleteP(base=BASE), epochs=None, steps=100)
  return tiny_language(**usual | fields)


def test_the_optimum_of_a_parabola_in_the_logarithm():
  losses = {2.0**n: 2 + 0.1 * (n + 6.3) ** 2 for n in range(-10, -3)}
  rate, low, high = optimum(losses)
  assert rate == pytest.approx(2**-6.3, rel=1e-6) and (low, high) == (2**-7, 2**-5)


def test_the_optimum_lies_between_measured_rates():
  steep = {1.0: 9.0, 2.0: 1.0, 4.0: 1.1, 8.0: 1.1, 16.0: 40.0}
  assert optimum(steep)[0] in (1.0, 4.0) or 1 < optimum(steep)[0] < 4
  assert optimum({1.0: 2.0, 2.0: 1.0, 4.0: 2.0, 8.0: None})[0] == 2.0


@pytest.mark.parametrize("losses", [{1.0: 1.0, 2.0: 2.0, 4.0: 3.0}, {1.0: 2.0, 2.0: 1.0}, {}])
def test_an_optimum_at_the_edge_is_refused(losses):
  with pytest.raises(ConfigError, match=r"best learning rate=.*; sweep optimizer\.lr further"):
    optimum(losses)


def values(config, old=None):
  rows = settings(to_plain(old or small()), DERIVED, 0.01, config)
  return {name: value for name, (_, value, _) in rows.items()}


def test_adamw_follows_the_square_root_of_the_batch():
  adamw = cfg.AdamW(lr=1.0, weight_decay=0.1, b2=0.95)
  config = small(batch_size=64, steps=50, optimizer=adamw)
  wanted = {"optimizer.lr": 0.02, "optimizer.weight_decay": 0.2, "optimizer.eps": 5e-9}
  wanted |= {"optimizer.b1": 0.6, "optimizer.b2": 0.8}
  wanted |= {"batch_size": 64, "steps": 50, "schedule.warmup_steps": 10}
  assert values(config, small(optimizer=adamw)) == pytest.approx(wanted)


def test_moments_outside_the_rule_stay():
  config = small(batch_size=256)
  found = settings(to_plain(small()), DERIVED, 0.01, config)
  assert found["optimizer.b1"][:2] == (0.9, 0.9) and found["optimizer.b2"][:2] == (0.999, 0.999)
  assert found["optimizer.b1"][2].startswith("kept")
  assert found["steps"][2] == "16 times the examples, no rule applied"


def test_muon_and_sgd():
  muon, sgd = cfg.Muon(lr=1.0, weight_decay=0.1), cfg.SGD(lr=1.0, weight_decay=0.1)
  found = values(small(batch_size=64, optimizer=muon), small(optimizer=muon))
  assert (found["optimizer.lr"], found["optimizer.weight_decay"]) == (0.02, 0.2)
  found = values(small(batch_size=64, optimizer=sgd), small(optimizer=sgd))
  assert found["optimizer.lr"] == 0.04 and "optimizer.weight_decay" not in found


WIDE = cfg.Transformer(num_layers=2, width=64, num_heads=4, hidden=64)


def test_an_optimizer_of_ones_own_has_only_its_own_settings():
  own = type("Own", (cfg.Optimizer,), {"update_rule": "adam"})
  config = small(optimizer=own(lr=0.01))
  rows = values(config, config)
  assert not {"optimizer.weight_decay", "optimizer.eps"} & rows.keys()
  own.update_rule = "lion"
  with pytest.raises(ConfigError, match="Own cannot transfer from"):
    values(config, config)


REFUSED = [
  (dict(optimizer=cfg.LAMB(lr=1.0)), "optimizer=LAMB cannot transfer from AdamW"),
  (dict(parametrization=cfg.MuP(base=BASE)), "parametrization=MuP cannot transfer from CompleteP"),
  (dict(parametrization=cfg.CompleteP(base=BASE | {"width": 32})), "parametrization=CompleteP"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_has_no_rule_is_refused(fields, message):
  with pytest.raises(ConfigError, match=message):
    values(small(**fields))


def test_the_standard_parametrization_transfers_to_the_same_model_only():
  old = small(parametrization=cfg.Standard())
  plain = to_plain(old)
  del plain["parametrization"]  # a run of an earlier version
  assert settings(plain, DERIVED, 0.01, old)["optimizer.lr"][1] == 0.01
  with pytest.raises(ConfigError, match="parametrization=Standard cannot transfer"):
    settings(plain, DERIVED, 0.01, dataclasses.replace(old, model=WIDE))


def write(folder, config, loss):
  folder.mkdir()
  plain = to_plain(config)
  derived = DERIVED | {"peak_lr": config.optimizer.lr}
  data = {"vocab_size": 256, "sequence_length": 16, "bytes_per_token": 1.0, "name": "words"}
  described = {"format": FORMAT, "config": plain, "derived": derived, "data": data}
  (folder / "config.json").write_text(json.dumps(described))
  if loss is not None:
    text = json.dumps({"outcome": "done", "step": 100, "loss": loss})
    (folder / "summary.json").write_text(text)


def test_the_report_of_runs(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  losses = {0.001: 3.0, 0.002: 2.0, 0.004: 3.0, 0.008: None}
  for rate, loss in losses.items():
    for seed in (0, 1):
      config = small(optimizer=cfg.AdamW(lr=rate), seed=seed)
      write(tmp_path / f"r{rate}-{seed}", config, None if loss is None else loss + 0.01 * seed)
  large = small(batch_size=64, model=WIDE, clip_norm=1.0)
  (tmp_path / "large.py").write_text(HEAD + repr(large))
  names = sorted(path.name for path in tmp_path.glob("r0*"))
  assert cli.main(["transfer", *names, "--config", "large.py"]) == 0
  page = capsys.readouterr().out
  lines = page.splitlines()
  assert re.fullmatch(r"0\.002 +2\.0050", lines[2])
  assert "best lr 0.002 (parabola in log2), between 0.001 and 0.004" in page
  assert "CompleteP, for a config that differs in\n  model.width: 32 to 64\n" in page
  assert "\n  clip_norm: None to 1.0\n" in page  # no rule applies to it
  assert lines[-1].startswith("jaxscale train --config ")
  assert " --config.lr_scaling=none --config.optimizer.lr=0.004 " in lines[-1]
  assert cli.main(["transfer", names[0], names[2], "--config", "large.py"]) == 2
  assert "sweep optimizer.lr further" in capsys.readouterr().err
  write(tmp_path / "other", small(optimizer=cfg.AdamW(lr=0.001, b1=0.8)), 2.0)
  assert cli.main(["transfer", *names, "other", "--config", "large.py"]) == 2
  assert "other differs from r0.001-0 in optimizer.b1; give" in capsys.readouterr().err
