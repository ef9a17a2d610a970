"""The exchange that a config asks for is what the compiled step sends."""

import json
import re

import jax
import pytest

from jaxscale import config as cfg
from jaxscale import hlo, train
from jaxscale.config.record import to_plain
from jaxscale.exchange.local_updates import BlockMomentumState
from jaxscale.experiment import build
from jaxscale.run.workdir import claim_workdir
from support.configs import recorded, small_config
from support.errors import config_error
from support.recipes import PowerSGD, TopK

N, HIDDEN = 8, 128
PARAMS = 64 * HIDDEN + HIDDEN + HIDDEN * 10 + 10


def config(**fields):
  usual = dict(model=cfg.MLP(hidden=(HIDDEN,)), batch_size=64, mesh=cfg.Mesh(replica=2))
  return small_config(**usual | fields)


def sent(**fields):
  """Return what a step sends but for metrics: kind -> (times, bytes, dtypes)."""
  experiment = build.experiment(config(**fields))
  compiled = experiment.lower_train_step().compile()
  found = {}
  for row in hlo.collectives(compiled, experiment.mesh):
    if row.payload_bytes > 64:
      times, size, dtypes = found.get(row.kind, (0, 0, frozenset()))
      size += row.times * row.payload_bytes
      found[row.kind] = times + row.times, size, dtypes | {*row.dtypes}
  return found


DOUBLED = cfg.AllReduce(algorithm="torus", dims=("data:2", "data:2", "replica:2"))
THERE_AND_BACK = 2 * (1 - 1 / N)  # bytes of permutes, as a share of the gradients'
HIERARCHY = ["all-reduce", "reduce-scatter", "all-gather"]
PERMUTES = "collective-permute"
# Kinds that are sent and their dtype; the times of the first one, and its bytes a parameter.
SENT = [
  (cfg.AllReduce(algorithm="ring"), [PERMUTES], "f32", 2 * 7, 4 * THERE_AND_BACK),
  (DOUBLED, [PERMUTES], "f32", 2 * 3, 4 * THERE_AND_BACK),
  (cfg.AllReduce(algorithm="halving_doubling"), [PERMUTES], "f32", 2 * 3, 4 * THERE_AND_BACK),
  (cfg.AllReduce(algorithm="hierarchical"), HIERARCHY, "f32", None, 4 / 4),
  (cfg.HalfPrecision(), ["all-to-all", "all-gather"], "u16", 1, 2),
  (cfg.HalfPrecision(algorithm="ring"), [PERMUTES], "u16", 2 * 7, 2 * THERE_AND_BACK),
]


def test_psum_of_all_gradients_is_the_default():
  ((kind, (_, size, dtypes)),) = sent().items()
  assert (kind, dtypes) == ("all-reduce", {"f32"})
  assert size - 4 * PARAMS in (0, 4, 8)  # XLA may merge totals of metrics with them


@pytest.mark.parametrize("exchange, kinds, dtype, times, width", SENT)
def test_the_algorithm_is_what_is_sent(exchange, kinds, dtype, times, width):
  found = sent(exchange=exchange)
  sums = {(kind, *dtypes) for kind, (*_, dtypes) in found.items()}
  assert sums == {(kind, dtype) for kind in kinds}
  count, size, _ = found[kinds[0]]
  assert times in (None, count) and size == pytest.approx(width * PARAMS, rel=1e-2)


COMPRESSED = [(cfg.Int8(block=64), 0.30), (cfg.OneBit(), 0.09), (TopK(share=0.01), 0.18)]
COMPRESSED += [(PowerSGD(rank=2), 0.25)]


@pytest.mark.parametrize("exchange, below", COMPRESSED)
def test_compressed_exchanges_send_less(exchange, below):
  def wire(**fields):
    experiment = build.experiment(config(**fields))
    compiled = experiment.lower_train_step().compile()
    return hlo.total(hlo.collectives(compiled, experiment.mesh)).wire_bytes

  assert wire(exchange=exchange) < below * wire()


def test_buckets_and_delay():
  experiment = build.experiment(config(exchange=cfg.AllReduce(bucket_bytes=8192, delayed=True)))
  state = experiment.abstract_state()
  own = jax.tree.leaves(state.exchange_state)
  assert sum(x.size for x in own) == N * PARAMS


def test_plain_epochs_are_steps_of_the_run():
  """Half an epoch of 1,437 digits is 12 steps of 64."""
  experiment = build.experiment(config(exchange=cfg.OneBit(plain_epochs=0.5)))
  lowered = experiment.lower_train_step().as_text()
  assert "stablehlo.case" in lowered and "dense<12> : tensor<i32>" in lowered


def test_workers_that_train_alone():
  experiment = build.experiment(config(sync=cfg.BlockMomentum(sync_every_steps=5)))
  assert experiment.sync is not None and experiment.sync.method.every == 5
  state = experiment.abstract_state()
  assert isinstance(state.opt_state, BlockMomentumState)
  compiled = experiment.lower_train_step().compile()
  table = hlo.collectives(compiled, experiment.mesh)
  assert all(row.conditional for row in table if row.payload_bytes > 64)
  # 5 steps of 8 examples of each of 8 workers, 8 times: more than there are.
  assert experiment.notes and "needs 2,560 different samples" in experiment.notes[0]
  grouped = build.experiment(config(sync=cfg.LocalSGD(sync_every_steps=5, workers="replica")))
  assert grouped.sync is not None and grouped.sync.workers == ("replica",)
  elastic = build.experiment(config(sync=cfg.SyncEASGD(moving_rate=0.4)))
  assert elastic.sync is not None and elastic.sync.method.elastic == pytest.approx(0.4 / N)


def test_the_plan_is_reported():
  torus = cfg.AllReduce(algorithm="torus")
  (note,) = build.experiment(config(exchange=torus)).notes
  assert note.startswith("exchange: torus data:2 x data:2 x replica:2, ")
  assert note.endswith(f"planned for messages of {4 * PARAMS / 1e6:.3g} MB on assumed links")


# What is typed, and a part of the line that answers.
MISTAKES = """
exchange.algorithm=rign                                'psum' | 'ring' | 'torus'
exchange=OneBits                                       did you mean 'OneBit'?
exchange.algorithm=torus exchange.dims=rack:2,data:4   no axis 'rack'
exchange.algorithm=torus exchange.dims=data:3          multiply to the 8
exchange.algorithm=ring exchange.dims=data:8           'torus'
exchange_top_k.py exchange.share=0.2                   give less than 0.125
exchange_top_k.py exchange.share=0                     give a value in (0, 1)
exchange_top_k.py exchange.per=layer                   'tensor' | 'bucket'
exchange_power_sgd.py exchange.rank=0                  give a value >= 1
exchange=Int8 exchange.bucket_bytes=64                 Int8.bucket_bytes=64 is less than a block
exchange.bucket_bytes=3                                give a value >= 4
exchange=Int8 exchange.block=0                         give a value >= 1
exchange=HalfPrecision exchange.dtype=float8           'bfloat16' | 'float16'
LOCAL sync.sync_every_steps=0                          give a value >= 1
BLOCK sync.outer_momentum=1.0                          give a value in [0, 1)
LOCAL exchange=OneBit exchange.plain_epochs=1          plain_epochs=1.0: with sync=LocalSGD workers
LOCAL lr_scaling=linear                lr_scaling='linear': with sync=LocalSGD each
LOCAL NORM                             CNN.bn_span=global would share BatchNorm
BLOCK FIVE RAMP   BlockMomentum.sync_every_steps=5 with 8 workers needs 20,480 different samples
BLOCK                                                  but the data set has 1,437; give
BLOCK optimizer=AdamW                                  AdamW's moments
BLOCK optimizer=LAMB                                   LAMB's moments
exchange=Int8 noise_scale=True                         use AllReduce or Half
exchange.delayed=True noise_scale=True                 AllReduce.delayed
LOCAL sync.worker_steps=2,1     LocalSGD.worker_steps=(2, 1) has 2 numbers for 8 workers
LOCAL sync.worker_steps=1,1,1,1,1,1,1,1                give 2 for the fastest workers
sync=DiLoCo exchange.delayed=True ema_decay=None       delayed to False
sync=DiLoCo                                            set ema_decay to None
sync=DiLoCo ema_decay=None noise_scale=True            compares gradients
""".strip().splitlines()
SHORT = {
  "LOCAL": "sync=LocalSGD sync.sync_every_steps=2 ema_decay=None",
  "BLOCK": "sync=BlockMomentum ema_decay=None optimizer=SGD",
  "FIVE": "sync.sync_every_steps=5",
  "NORM": "model.bn_span=global model.batch_norm=True",
  "RAMP": "phases.epochs=0,1 phases.batch_sizes=128,512",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_before_anything_is_compiled(mistake, monkeypatch, capsys, tmp_path):
  def compiled(*_):
    raise AssertionError("compiled")

  monkeypatch.setattr(build.Experiment, "lower_train_step", compiled)
  monkeypatch.setattr(build.Experiment, "init_state", compiled)
  settings, remedy = re.split(r"  +", mistake, maxsplit=1)
  settings = re.sub(r"\b[A-Z]{4,5}\b", lambda name: SHORT.get(name[0], name[0]), settings).split()
  recipe = settings.pop(0) if settings[0].endswith(".py") else "digits.py"
  argv = ["--config", f"configs/{recipe}", "--workdir", str(tmp_path / "w")]
  assert train.main(argv + [f"--config.{s}" for s in settings]) == 2
  out, err = capsys.readouterr()
  *notes, line = err.splitlines()
  assert all(note.startswith("note: optimizer=") for note in notes), notes
  assert line.startswith("error: ") and remedy in line and not out
  assert not (tmp_path / "w").exists()


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
  with config_error(match=r"optimizer.momentum is 0\.9 in the workdir and 0\.5"):
    claim_workdir(tmp_path, config(optimizer=cfg.SGD(lr=0.1, momentum=0.5)))
  claim_workdir(tmp_path, config(exchange=cfg.AllReduce(algorithm="ring")))
  with config_error(match=r"exchange.class is 'AllReduce' in the workdir"):
    claim_workdir(tmp_path, config(exchange=cfg.OneBit()))
  with config_error(match=r"exchange.delayed is False in the workdir"):
    claim_workdir(tmp_path, config(exchange=cfg.AllReduce(delayed=True)))


def test_a_directory_of_version_0_1_is_refused_in_a_line(tmp_path):
  old = {"config": {"class": "Config", "stages": {}}, "versions": {"jaxscale": "0.1.0"}}
  (tmp_path / "config.json").write_text(json.dumps(old))
  (tmp_path / "checkpoints" / "1").mkdir(parents=True)
  with config_error(match=r"written by jaxscale 0\.1\.0, .*CHANGELOG"):
    claim_workdir(tmp_path, config())
