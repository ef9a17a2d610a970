"""Callbacks of a user's file in two processes: a stop by one, a kill, and states that differ."""

import json

import pytest

from jaxscale.checkpoint.checkpoint_files import read_manifest
from support.tiny_runs import checksums, run_processes

FILE = '''
import os, signal

import jax
from jaxscale import Callback, Stop, config


class Counter(config.Callback):
  """Count of the steps.

  Attributes:
    last: the step at which process 1 asks to stop.
    differs: whether the state has the rank.
  """

  last: int = 24
  differs: bool = False

  def build(self, context):
    own = {"steps": 0, "loss": 0.0}

    def on_step(step, state, metrics):
      own.update(steps=own["steps"] + 1, loss=own["loss"] + metrics["loss"])
      if step == int(os.environ.get("KILLED_AT", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
      if step == self.last and jax.process_index() == 1:
        return Stop("process 1 has seen enough")

    def saved():
      return own | ({"rank": jax.process_index()} if self.differs else {})

    return Callback(on_step=on_step, state_dict=saved, load_state_dict=own.update)


def get_config():
  return config.Config(
    model=config.MLP(hidden=(16,)),
    data=config.Digits(),
    optimizer=config.SGD(lr=0.1),
    batch_size=128,
    steps=40,
    evaluation=config.Evaluation(every_steps=10),
    checkpoint=config.Checkpoint(every_steps=5),
    callbacks=(Counter(), config.EarlyStopping(patience=9), config.SampleWriter(count=4)),
    log=config.Log(plot=False, tensorboard=False),
  )
'''


@pytest.mark.slow
def test_all_stop_where_one_asks_and_resume_bit_for_bit(tmp_path):
  file = tmp_path / "counts.py"
  file.write_text(FILE)

  def run(name, *args, **env):
    return run_processes(tmp_path / name, 2, 1, *args, config=str(file), **env)

  for out, err, code in run("whole"):
    assert code == 0, out + err
  killed = run("killed", KILLED_AT="13")
  assert all(code != 0 for _, _, code in killed)
  outs = run("killed")
  assert [code for _, _, code in outs] == [0, 0], outs
  assert "resuming from the checkpoint of step" in outs[0][0]
  summaries = [json.loads((tmp_path / x / "summary.json").read_text()) for x in ("whole", "killed")]
  text = "counts:Counter at step 24: process 1 has seen enough"
  assert [(s["outcome"], s["step"], s["stopped_by"]) for s in summaries] == [("done", 24, text)] * 2
  assert checksums(tmp_path / "whole") == checksums(tmp_path / "killed")
  saved = [
    read_manifest(tmp_path / x / "checkpoints" / "24")["callbacks"] for x in ("whole", "killed")
  ]
  assert saved[0] == saved[1] and saved[0]["states"]["counts:Counter"]["steps"] == 24
  assert sorted(p.name for p in (tmp_path / "killed" / "samples").iterdir()) == [
    f"{step:06}.png" for step in (10, 20, 24)
  ]
  kept = "--config.callbacks=EarlyStopping,SampleWriter"
  changed = run("killed", kept)  # goes on without it
  assert "note: callbacks: counts:Counter is gone; it no longer stops the run" in changed[0][0]
  assert json.loads((tmp_path / "killed" / "summary.json").read_text())["step"] == 40
  (_, err, code), (*_, other) = run("differs", "--config.callbacks.Counter.differs=True")
  assert (code, other) == (2, 2) and err.count("\n") == 1
  assert "Callback.state_dict of counts:Counter, EarlyStopping and SampleWriter differs" in err
