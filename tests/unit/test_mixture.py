"""Mixtures: exact shares at every step, the same stream on any number of hosts."""

import dataclasses
import json

import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale import data
from jaxscale.config.loading import override
from jaxscale.config.record import from_plain, to_plain
from jaxscale.data.mixture import chairmen, mix, rounded
from jaxscale.experiment.build import make_data
from support.configs import small_config
from support.errors import config_error

WEIGHTS = [
  (0.7, 0.3),
  (1, 1, 1),
  (5, 1, 1, 1),
  (0.0002, 0.9998),
  (0.31, 0.29, 0.17, 0.13, 0.1),
  (1,),
]


def numbered(label, count, base, num_draws=2, **fields):
  """Return a dataset whose examples are base, base + 1, …, with their first draw."""
  info = data.DatasetInfo(
    label, None, label_shape=None, arrays={"x": ((), "int64"), "d": ((), "float64")}
  )

  def load(indices, draws):
    first = np.zeros(len(indices)) if draws is None else draws[:, 0]
    assert draws is None or draws.shape[1] == num_draws
    return {"x": indices + base, "d": first}

  return data.Dataset(info, count, load, num_draws, **fields)


def stream(dataset, sizes, hosts=1, position=0, seed=3):
  """Rows of the batches of these sizes, in the order of the global batch."""
  rows = []
  for size in sizes:
    for host in range(hosts):
      shard = host, hosts
      options = dict(seed=seed, position=position, shard=shard, num_threads=1)
      batch = next(data.train_batches(dataset, size, **options))
      rows.append(np.stack([batch["x"], batch["d"]], axis=1))
    position += size
  return np.concatenate(rows)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_counts_are_within_one_of_the_shares_at_every_position(weights):
  names = [f"s{i}" for i in range(len(weights))]
  counts = rounded(dict(zip(names, weights, strict=True)), [])
  table = np.array(chairmen(tuple(counts.tolist())))
  table = np.tile(table, 3)
  given = np.cumsum(table[:, None] == np.arange(len(weights)), axis=0)
  shares = np.float64(counts) / counts.sum()
  n = np.arange(1, len(table) + 1)[:, None]
  assert np.abs(given - n * shares).max() < 1
  exact = np.float64(weights) / np.sum(weights)
  assert np.abs(shares - exact).max() <= 1e-4


def test_weights_change_at_a_position_and_sources_go_on():
  sources = {"a": numbered("a", 50, 0), "b": numbered("b", 30, 1000)}
  both = mix(sources, {"a": (3, 1, 0), "b": (1, 3, 1)}, (40, 101))
  rows = stream(both, [8] * 30)[:, 0]
  is_a = rows < 1000
  n = np.arange(1, 241)
  expected = 0.75 * np.minimum(n, 40) + 0.25 * np.clip(n - 40, 0, 61)
  assert np.abs(np.cumsum(is_a) - expected).max() < 2  # less than one in each stretch
  assert not is_a[101:].any()
  for mine, size in ((rows[is_a], 50), (rows[~is_a] - 1000, 30)):
    for start in range(0, len(mine), size):  # each epoch has every example once
      epoch = mine[start : start + size]
      assert len({*epoch}) == len(epoch)
  progress = both.progress(240)
  assert progress["a/examples"] == is_a.sum() and progress["b/epoch"] == (~is_a).sum() / 30
  assert [both.progress(n)["a/examples"] for n in range(241)] == [0, *np.cumsum(is_a)]


def test_the_stream_is_that_of_any_hosts_and_batch_sizes():
  sources = {"a": numbered("a", 50, 0), "b": numbered("b", 30, 1000, num_draws=1)}
  both = mix(sources, {"a": (2, 1), "b": (1, 1)}, (60,))
  whole = stream(both, [240])
  for hosts, sizes in ((2, [8] * 30), (4, [12] * 20), (1, [40, 80, 120])):
    np.testing.assert_array_equal(stream(both, sizes, hosts), whole)
  np.testing.assert_array_equal(stream(both, [20], 2, position=100), whole[100:120])
  assert len({*whole[:, 1]}) == 240  # no two examples share their draws
  assert (stream(both, [240], seed=4)[:, 0] != whole[:, 0]).any()


def test_epochs_of_a_source_do_not_depend_on_the_others():
  a, b, c = numbered("a", 50, 0), numbered("b", 30, 1000), numbered("c", 20, 2000)
  two = stream(mix({"a": a, "b": b}, {"a": [1], "b": [1]}), [100])[:, 0]
  three = stream(mix({"a": a, "b": b, "c": c}, {"a": [1], "b": [1], "c": [1]}), [150])[:, 0]
  np.testing.assert_array_equal(two[two < 1000], three[three < 1000])


def test_orders_and_draws_of_sources_are_kept():
  def order(seed):
    return lambda positions: (positions % 5, positions // 5)

  windows = numbered("b", 5, 1000, draws_by_epoch=True, order=order)
  rows = stream(mix({"a": numbered("a", 9, 0), "b": windows}, {"a": [1], "b": [2]}), [60])
  b = rows[rows[:, 0] >= 1000]
  assert b[:, 0].tolist() == [1000 + i % 5 for i in range(40)]
  assert [len({*b[i : i + 5, 1]}) for i in range(0, 40, 5)] == [1] * 8 and len({*b[:, 1]}) == 8


def test_evaluations_see_all_examples_of_all_sources_once():
  both = mix({"a": numbered("a", 5, 0), "b": numbered("b", 3, 10)}, {"a": [1], "b": [0]})
  batches = [*data.eval_batches(both, 4)]
  assert np.concatenate([x["x"] for x in batches]).tolist() == [0, 1, 2, 3, 4, 10, 11, 12]


def test_damaged_examples_have_the_names_of_their_sources():
  def broken(name, count, damaged):
    made = numbered(name, count, 0, damaged=damaged, name=lambda i: f"{i}.jpg")

    def load(indices, draws):
      for i in indices[indices == 2]:
        damaged.add(int(i), "2.jpg")
      return made.load(indices, draws)

    return made._replace(load=load)

  sources = {n: broken(n, 4, data.DamagedExamples()) for n in "ab"}
  both = mix(sources, {"a": [1], "b": [1]})
  stream(both, [16])
  assert both.damaged.names == ["a: 2.jpg", "b: 2.jpg"] and both.damaged.indices == [2, 6]
  assert both.name(5) == "b: 1.jpg"


def test_rounding_is_noted_and_nothing_becomes_zero():
  notes = []
  counts = rounded({"a": 1, "b": 2}, notes)
  assert counts.tolist() == [3333, 6667] and "a 0.3333 and b 0.6667" in notes[0]
  notes.clear()
  assert rounded({"a": 0.1, "b": 0.2, "c": 0.7}, notes).tolist() == [1, 2, 7] and not notes
  with config_error(match="Mixture.weights.a=1e-05 of 1.00001 is less than one example in 10,000"):
    rounded({"a": 1e-5, "b": 1}, [])


def test_sources_that_differ_are_refused():
  small = data.synthetic(8, (4, 4, 3), 5)
  for other, field in (
    (data.synthetic(8, (4, 4, 3), 6), "num_classes=6"),
    (data.synthetic(8, (8, 8, 3), 5), "image_shape"),
  ):
    with config_error(match=f"Mixture.sources.b has {field}.*, but 'a' has"):
      mix({"a": small, "b": other}, {"a": [1], "b": [1]})
  with config_error(match="Mixture.sources.b is text, but 'a' is no text"):
    mix({"a": small, "b": data.text("test", sequence_length=16)}, {"a": [1], "b": [1]})


TWO: dict[str, cfg.Data] = {
  "a": cfg.Synthetic(num_examples=40),
  "b": cfg.Synthetic(num_examples=80),
}
MISTAKES = [
  (dict(weights={"a": 1}), "Mixture.weights has the names a, but sources has a and b"),
  (dict(weights={"a": 1, "b": -1}), r"Mixture.weights.b=.* is not a share"),
  (dict(weights={"a": 0, "b": 0}), "Mixture.weights are 0 for all sources"),
  (dict(weights={"a": (1, 2), "b": 1}), r"Mixture.weights.a=\(1.0, 2.0\) has 2"),
  (dict(weights={"a": (1, 2), "b": (1, 1)}, changes_at=(-3,)), "Mixture.changes_at"),
  (dict(sources={"a.b": TWO["a"]}, weights={"a.b": 1}), "Mixture.sources=a.b is not a name"),
  (dict(sources={"a": 3}, weights={"a": 1}), "Mixture.sources=.*expected dict from names to"),
]


@pytest.mark.parametrize("fields, message", MISTAKES)
def test_mistakes_are_one_line(fields, message):
  with config_error(match=message):
    cfg.Mixture(**{"sources": TWO} | fields)


def test_settings_go_to_json_and_the_command_line():
  mixture = cfg.Mixture(sources=TWO, weights={"a": (1, 2), "b": (3, 4)}, changes_at=(100,))
  plain = json.loads(json.dumps(to_plain(mixture)))
  assert from_plain(cfg.Data, plain) == mixture
  config = small_config(data=mixture)
  changed = override(config, {"data.sources.a.num_examples": "50", "data.weights.b": "(1, 1)"})
  assert changed.data.sources == {**TWO, "a": cfg.Synthetic(num_examples=50)}
  assert changed.data.weights == {"a": (1, 2), "b": (1, 1)}
  other = override(config, {"data.sources.a": "Digits"})
  assert other.data.sources["a"] == cfg.Digits()
  with config_error(match="--config.data.sources.c"):
    override(config, {"data.sources.c.num_examples": "50"})
  train, held_out = dataclasses.replace(mixture, changes_at=(7,)).build()
  assert train.num_examples == 120 and held_out.num_examples == 12


class Own(cfg.Data):
  """Data whose `build` fails, or returns the wrong thing."""

  kind: str

  def build(self):
    if self.kind == "raises":
      raise KeyError("no such key")
    return None if self.kind == "none" else self


@pytest.mark.parametrize(
  ("kind", "message"),
  [
    ("raises", r"test_mixture.py:\d+: Own.build: KeyError: 'no such key'"),
    ("none", "Own.build returned NoneType; return two data.Dataset"),
    ("itself", "Own.build returned Own; return two data.Dataset"),
  ],
)
def test_an_error_in_an_own_source_is_one_line(kind, message):
  inner = cfg.Mixture(sources={"own": Own(kind=kind)}, weights={"own": 1})
  for sources in ({"a": TWO["a"], "own": Own(kind=kind)}, {"inner": inner}):
    mixture = cfg.Mixture(sources=sources, weights=dict.fromkeys(sources, 1))
    with config_error(match=message):
      make_data(small_config(data=mixture))
