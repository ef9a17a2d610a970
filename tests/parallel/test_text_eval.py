"""Perplexity exact to the token, and runs whose result is one."""

import collections
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale import config as cfg
from jaxscale import data, metrics, models
from jaxscale.cli.train import _done
from jaxscale.data.python_docs import documents
from jaxscale.data.stream import of_array, windows
from jaxscale.experiment import build
from jaxscale.jobs import status
from jaxscale.jobs.scaling_report import report
from jaxscale.mesh import make_mesh
from jaxscale.run.fit import fit
from jaxscale.training import loop
from jaxscale.training.step import make_eval_step
from support.configs import small_config
from support.job_script import RUN

VOCABULARY = 256


def totals(table, batch):
  """Return sums over predicted tokens for a model that sees only the last token."""
  logits = table[batch["tokens"]]
  targets = batch["targets"]
  counts = targets >= 0
  if "mask" in batch:
    counts &= batch["mask"][:, None]
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
  return {
    "loss": jnp.where(counts, losses, 0.0).sum(),
    "accuracy": ((logits.argmax(-1) == targets) & counts).sum(dtype=jnp.int32),
    "examples": counts.sum(dtype=jnp.int32),
  }


@pytest.fixture(scope="module")
def table():
  """Scores of the next byte by the last one, far from uniform."""
  return np.random.default_rng(0).normal(0, 3, (256, 256)).astype(np.float32)


@pytest.fixture(scope="module")
def stream():
  """Return the validation documents, read from the file without a dataset."""
  return as_stream(documents()[9::10][:7])


def as_stream(texts):
  return np.frombuffer(b"".join(text + b"\0" for text in texts), np.uint8)


def counted(table, stream):
  """Loss, hits and tokens of a text in float64: a sum over pairs of bytes."""
  scores = table.astype(np.float64)
  most = scores.max(axis=1, keepdims=True)
  logs = scores - most - np.log(np.exp(scores - most).sum(axis=1, keepdims=True))
  pairs = collections.Counter(zip(np.roll(stream, 1), stream, strict=True))
  loss = -math.fsum(n * logs[pair] for pair, n in pairs.items())
  hits = sum(n for (a, b), n in pairs.items() if scores[a].argmax() == b)
  return loss, hits, len(stream)


@pytest.mark.slow
def test_the_sum_over_windows_is_the_sum_over_the_stream(table, stream):
  loss, hits, tokens = counted(table, stream)
  evaluations = []
  sizes = [(1, 3, 100), (1, 7, 100), (1, 64, 100), (2, 4, 100), (2, 64, 100), (8, 8, 100)]
  sizes += [(8, 64, 100), (1, 7, 999), (8, 16, 37), (1, 1, 30_000)]
  for devices, batch_size, length in sizes:
    mesh = make_mesh(devices=jax.devices()[:devices])
    dataset = windows("held-out", of_array(stream, 0), VOCABULARY, length)
    eval_step = make_eval_step(lambda params, _, batch: totals(params, batch), mesh)
    sums: dict = collections.defaultdict(float)
    counts = []

    def recorded(*args, eval_step=eval_step, counts=counts, sums=sums):
      found = eval_step(*args)
      counts.append((int(found["examples"]), int(found["accuracy"])))
      sums["loss"] += float(found["loss"])
      return found

    batches = data.to_device(data.eval_batches(dataset, batch_size), mesh)
    values = loop.evaluate(recorded, table, {}, batches)
    assert np.sum(counts, axis=0).tolist() == [tokens, hits]
    assert sums["loss"] == pytest.approx(loss, rel=1e-6)
    assert values["loss"] == pytest.approx(loss / tokens, rel=1e-6)
    assert values["accuracy"] == hits / tokens
    evaluations.append(values["loss"])
  assert max(evaluations) / min(evaluations) - 1 < 1e-6


def test_hosts_have_every_token_once(stream):
  dataset = windows("held-out", of_array(stream, 0), VOCABULARY, 333)
  for num_hosts in (1, 2, 4):
    seen = 0
    for i in range(num_hosts):
      for batch in data.eval_batches(dataset, 8, shard=(i, num_hosts)):
        seen += (batch["targets"][batch["mask"]] >= 0).sum()
    assert seen == len(stream)


def test_perplexity_and_bits():
  found = metrics.perplexity_of(1.5, 1.0)
  assert found == pytest.approx({"perplexity": 4.4816890703, "bits_per_byte": 2.1640425613})
  bits = metrics.perplexity_of(3.0, 4.0)["bits_per_byte"]
  assert bits == pytest.approx(3.0 / 0.6931471805599453 / 4)
  assert set(metrics.perplexity_of(1.5, None)) == {"perplexity"}
  assert metrics.perplexity_of(1e6, None)["perplexity"] == math.inf
  assert math.isnan(metrics.perplexity_of(math.nan, None)["perplexity"])


def test_the_best_checkpoints_of_a_language_model_have_the_lowest_loss():
  """A higher accuracy of the next token does not make a better model of text."""
  losses = [2.5, 1.0, 3.0, 2.0]
  names = [dict(loss=x, perplexity=math.exp(x), accuracy=x / 10) for x in losses]
  assert sorted(losses, reverse=True) == [x["loss"] for x in sorted(names, key=metrics.score)]


# A whole run, of the smallest language model there is.


class Bigram(cfg.Model):
  """The next byte by the last one, as two pure functions."""

  takes_text = True

  def build(self, context):
    def init(key):
      return {"table": 0.01 * jax.random.normal(key, (256, 256))}, {}

    def apply(params, model_state, tokens, train, keys):
      return params["table"][tokens], model_state

    return models.ModelFns(init, apply)


@pytest.fixture
def bigram():
  """Return the config of a bigram model."""
  return small_config(
    model=Bigram(),
    data=cfg.Text(sequence_length=512),
    optimizer=cfg.SGD(lr=8.0, weight_decay=0.0),
    schedule=cfg.Cosine(warmup_epochs=0.0),
    batch_size=64,
    epochs=1.0,
    target_loss=3.6,
    evaluation=cfg.Evaluation(every_epochs=0.5, batch_size=24),
    checkpoint=cfg.Checkpoint(every_epochs=0.5, keep_last=1, keep_best=1, best_metric="perplexity"),
    log=cfg.Log(every_steps=8, tensorboard=False),
  )


@pytest.mark.slow
def test_a_run_of_a_language_model(bigram, tmp_path, capsys):
  (tmp_path / "events").mkdir()
  tmp_path = tmp_path / "train"
  experiment = build.experiment(bigram)
  shapes = {n: (x.shape, str(x.dtype)) for n, x in experiment.abstract_batch().items()}
  assert shapes == dict.fromkeys(("tokens", "targets"), ((64, 512), "int32"))
  state, summary = fit(bigram, tmp_path)
  loss, hits, tokens = counted(np.asarray(state.params["table"]), as_stream(documents()[9::10]))
  assert summary["loss"] == pytest.approx(loss / tokens, rel=1e-5)
  assert summary["accuracy"] == hits / tokens
  assert summary["perplexity"] == pytest.approx(math.exp(summary["loss"]))
  assert summary["bits_per_byte"] == pytest.approx(summary["loss"] / math.log(2))
  assert summary["loss"] < 3.6 and summary["outcome"] == "done"
  assert summary["best_metric"] == "-perplexity"
  assert summary["target_step"] is not None and (tmp_path / "metrics.png").exists()

  lines = metrics.read_json_lines(tmp_path / "metrics.jsonl")
  trained = next(line for line in lines if "train/loss" in line)
  assert trained["train/perplexity"] == pytest.approx(math.exp(trained["train/loss"]))
  assert any("perf/tokens_per_s" in line for line in lines)
  evaluated = [line["eval/perplexity"] for line in lines if "eval/perplexity" in line]
  assert evaluated[-1] == summary["perplexity"] < evaluated[0]
  reported = capsys.readouterr().out
  assert f"validation loss {summary['loss']:.4f}  perplexity" in reported
  assert "accuracy" not in reported.partition("derived")[2].replace("target_accuracy", "")
  done = _done(summary, tmp_path)
  assert "(target loss 3.6: reached)" in done and "bits/byte" in done

  row = status.status(RUN._replace(folder=str(tmp_path.parent)), 0, "7", None)
  shown = f"ppl {summary['perplexity']:.3f}"
  assert row.perplexity == summary["perplexity"] and shown in str(status.StatusTable([row]))
  name = tmp_path.name
  study = report(name, [tmp_path], tmp_path / "to")
  assert shown in str(study)
  assert str(summary["perplexity"]) in (tmp_path / "to" / "scaling.csv").read_text()
  resumed = fit(bigram, tmp_path).summary  # evaluates again, counts the same
  assert resumed["loss"] == summary["loss"]
  assert resumed["target_step"] == summary["target_step"]


def test_a_picture_of_a_language_model_has_perplexity(tmp_path, monkeypatch):
  from matplotlib.figure import Figure

  lines = [
    {"step": s, "train/loss": 3 / s, "train/accuracy": 0.1, "time": float(s)} for s in (1, 2, 3)
  ]
  for line in lines:
    line |= {f"{part}/perplexity": 20 / line["step"] for part in ("train", "eval")}
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (tmp_path / "metrics.jsonl").write_text(text)
  titles = []

  def save(figure, *_, **__):
    titles.extend(axis.get_title(loc="left") for axis in figure.axes)

  monkeypatch.setattr(Figure, "savefig", save)
  assert metrics.plot_metrics(tmp_path)
  assert titles[:4] == ["Loss", "Perplexity", "Learning rate", "Speed"]
  assert titles[4:] == ["Use of a device", "Memory of a device"]
