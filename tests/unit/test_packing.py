"""Documents in windows of one length: best fit, one each, and the masked stream."""

import numpy as np
import pytest

from jaxscale import data
from jaxscale.data import packing as packing_module
from jaxscale.data.packing import best_fit, text_windows
from jaxscale.data.stream import of_array, windows
from support.errors import config_error

pytestmark = pytest.mark.usefixtures("own_cache")

RNG = np.random.default_rng(0)
END = 0
PACKINGS = ["masked_stream", "best_fit", "none"]


def documents_of(count, most=90):
  """Return documents of mixed lengths, each token of which is its own, and the stream of them."""
  lengths = np.minimum(RNG.geometric(0.05, count), most)
  bodies = np.split(np.arange(1, lengths.sum() + 1), lengths.cumsum()[:-1])
  return [body.tolist() for body in bodies], np.concatenate([[*b, END] for b in bodies])


def stream_of(tokens, is_known=True):
  """Return a stream whose lengths of documents are known, or only their separator."""
  lengths = np.diff([0, *(np.flatnonzero(tokens == END) + 1)])
  stream = of_array(tokens, END)
  return stream._replace(lengths=lambda: lengths) if is_known else stream


def whole(dataset):
  return dataset.load(np.arange(dataset.num_examples), None)


def pieces(batch):
  """Return (tokens, targets) of each document of each window, without padding."""
  arrays = (batch[name] for name in ("tokens", "targets", "documents"))
  for tokens, targets, numbers in zip(*arrays, strict=True):
    assert numbers[0] == 0 and set(np.diff(numbers)) <= {0, 1}
    for number in np.unique(numbers):
      is_in = numbers == number
      if (targets[is_in] >= 0).any():
        yield tokens[is_in].tolist(), targets[is_in].tolist()


def naive_loads(sizes, capacity):
  """Best-fit decreasing by comparing every size with every bin."""
  rooms = []
  for size in sorted(sizes, reverse=True):
    fits = [i for i, room in enumerate(rooms) if room >= size]
    if fits:
      rooms[min(fits, key=lambda i: rooms[i])] -= size
    else:
      rooms.append(capacity - size)
  return sorted(capacity - room for room in rooms)


@pytest.mark.parametrize("capacity", [1, 7, 64, 256])
def test_best_fit_is_that_of_the_plain_loop(capacity):
  for count in (1, 5, 300):
    sizes = RNG.integers(1, capacity + 1, count)
    bins = best_fit(sizes, capacity)
    loads = np.bincount(bins, sizes)
    assert sorted(loads) == naive_loads(sizes.tolist(), capacity) and loads.max() <= capacity
    assert set(bins) == set(range(bins.max() + 1))


@pytest.mark.parametrize("is_known", [True, False], ids=["lengths", "separators"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_token_is_predicted_once_from_its_own_document(packing, is_known, monkeypatch):
  monkeypatch.setattr(packing_module, "_SCANNED", 50)
  bodies, tokens = documents_of(300)
  dataset = text_windows("x", stream_of(tokens, is_known), 10_000, 100, packing)
  batch = whole(dataset)
  assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
    name: ((dataset.num_examples, 100), np.int32) for name in ("tokens", "targets", "documents")
  }
  targets = batch["targets"][batch["targets"] >= 0]
  assert sorted(targets) == sorted(tokens)
  if packing != "masked_stream":  # each document is whole, and begins from a separator
    found = sorted(pieces(batch))
    assert found == sorted(([END, *body], [*body, END]) for body in bodies)
    assert packing == "best_fit" or dataset.num_examples == 300
  for given, predicted in pieces(batch):
    assert given[1:] == predicted[:-1] and END not in given[1:]
    assert given[0] in (END, predicted[0] - 1) or predicted == [END]


@pytest.mark.parametrize("cut", [0.0, 0.31, 0.999])
def test_the_masked_stream_has_the_tokens_of_the_stream(cut):
  _, tokens = documents_of(50)
  stream = stream_of(tokens)
  plain, masked = (text_windows("x", stream, 10_000, 64, p) for p in ("stream", "masked_stream"))
  draws = np.full((plain.num_examples, 1), cut)
  for draw in (None, draws):
    batches = [d.load(np.arange(d.num_examples), draw) for d in (plain, masked)]
    for name in ("tokens", "targets"):
      np.testing.assert_array_equal(batches[0][name], batches[1][name])
    documents = batches[1]["documents"]
    for row, numbers in enumerate(documents):
      expected, number = [], -1
      for j in range(64):
        is_padding = batches[0]["targets"][row, j] < 0
        was_padding = j and batches[0]["targets"][row, j - 1] < 0
        is_first = batches[0]["tokens"][row, j] == END
        number += bool(j == 0 or (is_padding and not was_padding) or (is_first and not is_padding))
        expected.append(number)
      assert numbers.tolist() == expected


def test_longer_documents_are_cut_and_said():
  tokens = np.array([*range(1, 24), END, 30, 31, END])
  dataset = text_windows("x", stream_of(tokens), 40, 10, "best_fit")
  (note,) = dataset.notes
  assert note == (
    "x: 2 documents in 3 windows of 10, 90.0% full; 1 document longer than a window cut into 3"
  )
  found = sorted(pieces(whole(dataset)))
  cut = [([END, *range(1, 10)], [*range(1, 11)]), ([*range(10, 20)], [*range(11, 21)])]
  cut += [([20, 21, 22, 23], [21, 22, 23, END]), ([END, 30, 31], [30, 31, END])]
  assert found == sorted(cut)


def test_padding_has_a_number_of_its_own_and_is_not_learned():
  dataset = text_windows("x", stream_of(np.array([5, 6, END, 7, END])), 10, 8, "best_fit")
  batch = whole(dataset)
  assert batch["documents"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
  assert batch["tokens"].tolist() == [[END, 5, 6, END, 7, 0, 0, 0]]
  assert batch["targets"].tolist() == [[5, 6, END, 7, END, -1, -1, -1]]


@pytest.mark.parametrize("packing", PACKINGS)
def test_hosts_resume_and_epochs(packing):
  _, tokens = documents_of(400)
  dataset = text_windows("x", stream_of(tokens), 10_000, 100, packing)
  batch_size, steps = 8, 3 * dataset.num_examples // 8 + 2

  def batches(first=0, shard=(0, 1)):
    options = {"seed": 3, "position": first * batch_size, "shard": shard}
    one = data.train_batches(dataset, batch_size, **options)
    return [next(one) for _ in range(steps - first)]

  expected = batches()
  for count in (2, 4):
    hosts = [batches(shard=(i, count)) for i in range(count)]
    for step, batch in enumerate(expected):
      for name, array in batch.items():
        np.testing.assert_array_equal(array, np.concatenate([h[step][name] for h in hosts]))
  resumed = batches(first=steps // 2)
  for batch, again in zip(expected[steps // 2 :], resumed, strict=True):
    for name, array in batch.items():
      np.testing.assert_array_equal(array, again[name])
  rows = np.concatenate([b["targets"] for b in expected])[: 2 * dataset.num_examples]
  for epoch in np.split(rows, 2):
    assert sorted(epoch[epoch >= 0]) == sorted(tokens)
  found = np.concatenate([b["targets"][b["mask"]] for b in data.eval_batches(dataset, 8)])
  assert sorted(found[found >= 0]) == sorted(tokens)


def test_mixed_lengths_fill_the_windows():
  # Lengths of documents on the web are about log-normal: here with a median of 400 tokens.
  lengths = np.maximum(np.random.default_rng(1).lognormal(6, 1.2, 20_000).astype(int), 1)
  stream = of_array(np.ones(lengths.sum(), np.uint8), END)._replace(lengths=lambda: lengths)
  for length in (1024, 2048, 8192):
    dataset = text_windows("x", stream, 2, length, "best_fit")
    assert lengths.sum() / (dataset.num_examples * length) > 0.99
    unpacked = text_windows("x", stream, 2, length, "none")
    assert unpacked.num_examples > 1.3 * dataset.num_examples


def test_tokens_without_a_separator_are_not_packed():
  stream = of_array(np.arange(99), None)
  for packing in PACKINGS:
    with config_error(f"TextFiles.packing={packing} needs to know where documents end"):
      text_windows("x", stream, 100, 8, packing, "TextFiles.packing")
  for packing in ("stream", "masked_stream"):
    with config_error("x has 3 tokens, fewer than --config.data.sequence_length=8"):
      text_windows("x", of_array(np.arange(3), 0), 100, 8, packing)
  with config_error("the text is empty"):
    text_windows("x", stream_of(np.array([], int)), 100, 8, "best_fit")


def test_the_first_document_does_not_see_the_last_one():
  """Training windows begin anywhere in the text, whose last document may lack its separator."""
  stream = of_array(np.array([1, 2, 9, 3, 4, 5]), separator=9)
  whole = windows("text", stream, 10, 6, is_masked=True)
  for cut in range(6):
    batch = whole.load(np.zeros(1, np.int64), np.array([[(cut + 0.5) / 6]]))
    tokens, targets, documents = (batch[n][0].tolist() for n in ("tokens", "targets", "documents"))
    assert targets == [*[1, 2, 9, 3, 4, 5][cut:], *[1, 2, 9, 3, 4, 5][:cut]]
    before = {1: 9, 2: 1, 9: 2, 3: 9, 4: 3, 5: 4}
    assert tokens == [before[target] for target in targets]
    of = dict(zip(targets, documents, strict=True))
    # The document that the window begins in the middle of may come again at its end.
    assert of[5] != of[1]
    assert of[4] == of[5] or cut == 5
    assert documents == sorted(documents) and documents[0] == 0
