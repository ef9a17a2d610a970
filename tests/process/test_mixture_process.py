"""A mixture of corpora in two processes that are killed: resumed, its losses are the same bits."""

import json
import signal

import numpy as np
import pytest

from support import at_step
from support.commands import train_command
from support.processes import killed_at_end, run_group, start_group, wait_until
from support.tiny_runs import newest_step

CONFIG = """
from jaxscale import config as cfg


def get_config(path):
  sources = {
    name: cfg.TextFiles(path=f"{path}/{name}", packing="best_fit", sequence_length=32)
    for name in ("web", "code")
  }
  return cfg.Config(
    model=cfg.Transformer(num_layers=1, width=16, num_heads=2, hidden=32),
    data=cfg.Mixture(
      sources=sources, weights={"web": (0.7, 0.4), "code": (0.3, 0.6)}, changes_at=(250,)
    ),
    optimizer=cfg.AdamW(lr=3e-3), batch_size=8, steps=60,
    log=cfg.Log(every_steps=1, plot=False, tensorboard=False),
    evaluation=cfg.Evaluation(every_epochs=5),
    checkpoint=cfg.Checkpoint(every_epochs=None, every_steps=5),
  )
"""


def losses(run):
  """Return the metrics of training by step: the last ones, if a step was trained again."""
  whole = (run / "metrics.jsonl").read_text().rpartition("\n")[0]
  names = "train/loss", "data/web/examples", "data/code/examples"
  steps = {}
  for line in map(json.loads, whole.splitlines()):
    steps.setdefault(line["step"], {}).update(line)
  return {n: tuple(x[name] for name in names) for n, x in steps.items() if x.keys() >= {*names}}


@pytest.mark.slow
def test_a_killed_mixture_resumes_bit_for_bit(tmp_path):
  rng = np.random.default_rng(0)
  for name, count in (("web", 150), ("code", 60)):
    (tmp_path / name).mkdir()
    for split, few in (("train", 1), ("val", 10)):
      words = [
        " ".join(rng.choice([name, "a", "of", "is"], rng.integers(2, 9))) for _ in range(count)
      ]
      rows = [json.dumps({"text": text}) for text in words[: count // few]]
      (tmp_path / name / f"{split}.jsonl").write_text("\n".join(rows))
  file, calm, killed = tmp_path / "config.py", tmp_path / "calm", tmp_path / "killed"
  file.write_text(CONFIG)
  cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
  config = f"{file}:{tmp_path}"
  assert [code for *_, code in run_group(train_command(calm, config=config), **cache)] == [0, 0]
  env = cache | at_step.hold(40)
  with killed_at_end(*start_group(train_command(killed, config=config), **env)) as group:
    wait_until(lambda: newest_step(killed) and len(losses(killed)) > 10, group[0])
    for process in group:
      process.send_signal(signal.SIGKILL)
      process.communicate(timeout=60)
  assert len(losses(killed)) < 60
  ended = run_group(train_command(killed, config=config), **cache)
  assert [code for *_, code in ended] == [0, 0], ended
  assert "resum" in ended[0][0]
  first, second = losses(calm), losses(killed)
  assert [*first] == [*range(1, 61)] and second == first
  _, web, code = first[60]
  assert web + code == 480 and abs(web - (0.7 * 250 + 0.4 * 230)) < 2
