"""The exchange that a config asks for is what the compiled step sends."""

import dataclasses
import json

import jax
import pytest

from jaxscale import hlo, train
from jaxscale.config import (
  LAMB,
  MLP,
  SGD,
  AllReduce,
  BlockMomentum,
  Digits,
  DiLoCo,
  HalfPrecision,
  Int8,
  LocalSGD,
  Log,
  OneBit,
  PowerSGD,
  TopK,
)
from jaxscale.config import Config as Whole
from jaxscale.config import Mesh as Grid
from jaxscale.config.record import to_plain
from jaxscale.errors import ConfigError
from jaxscale.exchange.local_updates import BlockMomentumState
from jaxscale.experiment import build
from jaxscale.run.workdir import claim_workdir
from support.configs import recorded

N, HIDDEN = 8, 128
PARAMS = 64 * HIDDEN + HIDDEN + HIDDEN * 10 + 10


def config(**fields):
  return Whole(
    **{
      "model": MLP(hidden=(HIDDEN,)),
      "data": Digits(),
      "optimizer": SGD(lr=0.1),
      "batch_size": 64,
      "epochs": 2,
      "log": Log(tensorboard=False),
      "mesh": Grid(replica=2),
    }
    | fields
  )


def sent(**fields):
  """Return what a step sends but for metrics: kind -> (times, bytes, dtypes)."""
  experiment = build.experiment(config(**fields))
  compiled = experiment.lower_train_step().compile()
  found = {}
  for row in hlo.collectives(compiled, experiment.mesh):
    if row.payload_bytes > 64:
      times, size, dtypes = found.get(row.kind, (0, 0, frozenset()))
      found[row.kind] = (
        times + row.times,
        size + row.times * row.payload_bytes,
        dtypes | {*row.dtypes},
      )
  return found


def test_psum_of_all_gradients_is_the_default():
  ((kind, (_, size, dtypes)),) = sent().items()
  assert (kind, dtypes) == ("all-reduce", {"f32"})
  assert size - 4 * PARAMS in (0, 4, 8)  # XLA may merge totals of metrics with them


@pytest.mark.parametrize(
  ("exchange", "permutes"),
  [
    (AllReduce(algorithm="ring"), 2 * 7),
    (AllReduce(algorithm="torus", dims=("data:2", "data:2", "replica:2")), 2 * 3),
    (AllReduce(algorithm="halving_doubling"), 2 * 3),
  ],
)
def test_algorithms_of_permutes(exchange, permutes):
  found = sent(exchange=exchange)
  assert found.keys() == {"collective-permute"}
  times, size, _ = found["collective-permute"]
  assert times == permutes
  padded = -(-PARAMS // N) * N
  assert size == pytest.approx(2 * 4 * padded * (1 - 1 / N), rel=1e-2)


def test_the_hierarchy_goes_by_the_mesh():
  found = sent(exchange=AllReduce(algorithm="hierarchical"))
  assert found.keys() == {"reduce-scatter", "all-reduce", "all-gather"}
  assert found["all-reduce"][1] == pytest.approx(PARAMS, rel=1e-2)  # 4 bytes, 1/4


def test_half_precision_takes_an_algorithm_too():
  found = sent(exchange=HalfPrecision())
  assert {kind: dtypes for kind, (_, _, dtypes) in found.items()} == {
    "all-to-all": {"u16"},
    "all-gather": {"u16"},
  }
  ring = sent(exchange=HalfPrecision(algorithm="ring"))
  times, size, dtypes = ring["collective-permute"]
  assert dtypes == {"u16"} and times == 2 * 7
  assert size == pytest.approx(2 * 2 * PARAMS * (1 - 1 / N), rel=1e-2)


@pytest.mark.parametrize(
  ("exchange", "below"),
  [(Int8(block=64), 0.30), (OneBit(), 0.09), (TopK(share=0.01), 0.18), (PowerSGD(rank=2), 0.25)],
)
def test_compressed_exchanges_send_less(exchange, below):
  def wire(**fields):
    experiment = build.experiment(config(**fields))
    compiled = experiment.lower_train_step().compile()
    return hlo.total(hlo.collectives(compiled, experiment.mesh)).wire_bytes

  assert wire(exchange=exchange) < below * wire()


def test_buckets_and_delay():
  experiment = build.experiment(config(exchange=AllReduce(bucket_bytes=8192, delayed=True)))
  state = experiment.abstract_state()
  own = jax.tree.leaves(state.exchange_state)
  assert sum(x.size for x in own) == N * PARAMS


def test_plain_epochs_are_steps_of_the_run():
  """Half an epoch of 1,437 digits is 12 steps of 64."""
  experiment = build.experiment(config(exchange=OneBit(plain_epochs=0.5)))
  lowered = experiment.lower_train_step().as_text()
  assert "stablehlo.case" in lowered and "dense<12> : tensor<i32>" in lowered


def test_workers_that_train_alone():
  experiment = build.experiment(config(sync=BlockMomentum(sync_every_steps=5)))
  assert experiment.sync is not None and experiment.sync.method.every == 5
  state = experiment.abstract_state()
  assert isinstance(state.opt_state, BlockMomentumState)
  compiled = experiment.lower_train_step().compile()
  table = hlo.collectives(compiled, experiment.mesh)
  assert all(row.conditional for row in table if row.payload_bytes > 64)
  # 5 steps of 8 examples of each of 8 workers, 8 times: more than there are.
  assert experiment.notes and "wants 2,560 different samples" in experiment.notes[0]
  grouped = build.experiment(config(sync=LocalSGD(sync_every_steps=5, workers="replica")))
  assert grouped.sync is not None and grouped.sync.workers == ("replica",)


def test_the_plan_is_reported():
  torus = AllReduce(algorithm="torus")
  (note,) = build.experiment(config(exchange=torus)).notes
  assert note.startswith("exchange by torus data:2 x data:2 x replica:2, ")
  assert note.endswith(f"for {4 * PARAMS / 1e6:.3g} MB at once on assumed links")


MISTAKES = {
  "algorithm": (["exchange.algorithm=rign"], "'psum' | 'ring' | 'torus'"),
  "exchange": (["exchange=OneBits"], "did you mean 'OneBit'?"),
  "axis": (["exchange.algorithm=torus", "exchange.dims=rack:2,data:4"], "no axis 'rack'"),
  "dims": (["exchange.algorithm=torus", "exchange.dims=data:3"], "multiply to the 8"),
  "dims of a ring": (["exchange.algorithm=ring", "exchange.dims=data:8"], "'torus'"),
  "share": (["exchange=TopK", "exchange.share=0.2"], "give a share below 0.125"),
  "block": (["exchange=Int8", "exchange.bucket_bytes=64"], "Int8.bucket_bytes=64: holds no"),
  "bucket": (["exchange.bucket_bytes=3"], "give a value >= 4"),
  "plain epochs": (
    [
      "sync=LocalSGD",
      "sync.sync_every_steps=2",
      "ema_decay=None",
      "exchange=OneBit",
      "exchange.plain_epochs=1",
    ],
    "plain_epochs=1.0: workers send only",
  ),
  "scaled rate": (
    ["sync=LocalSGD", "sync.sync_every_steps=2", "ema_decay=None", "lr_scaling=linear"],
    "lr_scaling='linear': sync=LocalSGD has rates of one worker",
  ),
  "phases": (
    [
      "sync=BlockMomentum",
      "sync.sync_every_steps=5",
      "ema_decay=None",
      "optimizer=SGD",
      "phases.epochs=0,1",
      "phases.batch_sizes=128,512",
    ],
    "BlockMomentum.sync_every_steps=5: one block of 8 workers is 2,560 samples",
  ),
  "noise scale": (["exchange=Int8", "noise_scale=True"], "use AllReduce or Half"),
  "delayed ways": (["sync=DiLoCo", "exchange.delayed=True", "ema_decay=None"], "set it to False"),
  "average": (["sync=DiLoCo"], "set ema_decay to None"),
  "momentum": (["sync=BlockMomentum", "ema_decay=None", "optimizer=AdamW"], "AdamW's moments"),
  "samples": (
    ["sync=BlockMomentum", "ema_decay=None", "optimizer=SGD"],
    "more than the 1,437 there are; give ",
  ),
  "statistics": (
    [
      "sync=LocalSGD",
      "sync.sync_every_steps=2",
      "ema_decay=None",
      "model.bn_span=global",
      "model.batch_norm=True",
    ],
    "CNN.bn_span=global: BatchNorm statistics over workers",
  ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_before_anything_is_compiled(mistake, monkeypatch, capsys, tmp_path):
  def compiled(*_):
    raise AssertionError("compiled")

  monkeypatch.setattr(build.Experiment, "lower_train_step", compiled)
  monkeypatch.setattr(build.Experiment, "init_state", compiled)
  settings, remedy = MISTAKES[mistake]
  argv = ["--config", "configs/digits.py", "--workdir", str(tmp_path / "w")]
  assert train.main(argv + [f"--config.{s}" for s in settings]) == 2
  out, err = capsys.readouterr()
  *notes, line = err.splitlines()
  assert all(note.startswith("note: optimizer=AdamW keeps") for note in notes), notes
  assert line.startswith("error: ") and remedy in line and not out
  assert not (tmp_path / "w").exists()


def test_what_excludes_what():
  for fields, says in (
    ({"sync": DiLoCo(), "noise_scale": True}, "compares gradients"),
    ({"sync": BlockMomentum(), "optimizer": LAMB(lr=0.1)}, "LAMB's moments"),
    ({"exchange": AllReduce(delayed=True), "noise_scale": True}, "AllReduce.delayed"),
  ):
    with pytest.raises(ConfigError, match=says):
      config(**fields)
  kept = dataclasses.replace(config(), exchange=HalfPrecision(), noise_scale=True)
  assert kept.noise_scale


def test_whose_directory_it_is(tmp_path):
  """Another algorithm may resume a run, another compression may not."""
  # Written before there were exchanges.
  now = config()
  before = recorded(now) | {"config": {"class": "Config", "batch_size": 64}}
  for name in ("model", "data", "optimizer", "epochs", "mesh", "log"):
    before["config"][name] = to_plain(getattr(now, name))
  (tmp_path / "config.json").write_text(json.dumps(before))
  (tmp_path / "checkpoints" / "1").mkdir(parents=True)
  claim_workdir(tmp_path, now)
  # An optimizer's setting that has come since counts as its default, too.
  del before["config"]["optimizer"]["momentum"]
  (tmp_path / "config.json").write_text(json.dumps(before))
  claim_workdir(tmp_path, now)
  with pytest.raises(ConfigError, match=r"optimizer.momentum is 0\.9 there and 0\.5"):
    claim_workdir(tmp_path, config(optimizer=SGD(lr=0.1, momentum=0.5)))
  claim_workdir(tmp_path, config(exchange=AllReduce(algorithm="ring")))
  with pytest.raises(ConfigError, match=r"exchange.class is 'AllReduce' there"):
    claim_workdir(tmp_path, config(exchange=OneBit()))
  with pytest.raises(ConfigError, match=r"exchange.delayed is False there"):
    claim_workdir(tmp_path, config(exchange=AllReduce(delayed=True)))


def test_a_directory_of_version_0_1_is_refused_in_a_line(tmp_path):
  old = {"config": {"class": "Config", "stages": {}}, "versions": {"jaxscale": "0.1.0"}}
  (tmp_path / "config.json").write_text(json.dumps(old))
  (tmp_path / "checkpoints" / "1").mkdir(parents=True)
  with pytest.raises(ConfigError, match=r"written by jaxscale 0\.1\.0, .*CHANGELOG"):
    claim_workdir(tmp_path, config())
