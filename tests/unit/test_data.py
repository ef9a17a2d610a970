"""Input: deterministic, the same for any number of hosts, resumable, exact."""

import functools
import io
import queue

import numpy as np
import pytest
from PIL import Image

from jaxscale import config as cfg
from jaxscale import data
from jaxscale.data import augment, jpeg, pipeline
from jaxscale.data.arrays import from_arrays
from jaxscale.data.augment import NUM_DRAWS
from jaxscale.data.dataset import DatasetInfo
from jaxscale.errors import ConfigError
from jaxscale.mesh import make_mesh
from support.errors import config_error
from support.images import example, write_tfds


def take(batches, n):
  it = iter(batches)
  return [next(it) for _ in range(n)]


def join(parts):
  return {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}


def assert_equal(a, b):
  assert a.keys() == b.keys()
  for name in a:
    np.testing.assert_array_equal(a[name], b[name])


@pytest.fixture(scope="module")
def digits():
  return data.digits("train")


def test_digits_are_scikit_learns(digits):
  from sklearn.datasets import load_digits

  known = load_digits()
  parts = [digits, data.digits("test")]
  loaded = join([d.load(np.arange(d.num_examples), None) for d in parts])
  np.testing.assert_array_equal(loaded["image"][..., 0], known.images)
  np.testing.assert_array_equal(loaded["label"], known.target)
  assert [d.num_examples for d in parts] == [1437, 360]
  train = known.images[:1437]
  assert digits.info.mean[0] == pytest.approx(train.mean(), abs=0.01)
  assert digits.info.std[0] == pytest.approx(train.std(), abs=0.01)


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_hosts_split_the_same_global_batch(digits, num_hosts):
  whole = take(data.train_batches(digits, 64, seed=3), 30)
  shards = [(i, num_hosts) for i in range(num_hosts)]
  hosts = [take(data.train_batches(digits, 64, seed=3, shard=shard), 30) for shard in shards]
  for step, batch in enumerate(whole):
    assert_equal(batch, join([h[step] for h in hosts]))


def test_one_integer_resumes(digits):
  whole = take(data.train_batches(digits, 64), 30)
  for start in (1, 17, 29):
    resumed = take(data.train_batches(digits, 64, position=64 * start), 30 - start)
    for a, b in zip(whole[start:], resumed, strict=True):
      assert_equal(a, b)


def test_threads_load_ahead_of_the_step_and_no_further():
  started = queue.SimpleQueue()

  def load(step):
    started.put(step)
    if step == 6:
      raise OSError("the disk is away")
    return {"step": np.array(step)}

  batches = pipeline.load_ahead(load, num_threads=2, ahead=4)
  assert started.empty()  # until the first is asked for
  assert [int(batch["step"]) for batch in take(batches, 6)] == list(range(6))
  with pytest.raises(OSError, match="the disk is away"):
    next(batches)
  assert started.qsize() <= 7 + 2 * 2


@pytest.mark.parametrize(
  "limit, ahead", [(1 << 40, 8), (3 * 32 * 66, 3), (32 * 66, 1), (1, 1)], ids=str
)
def test_waiting_batches_are_bounded_in_bytes_and_all_threads_work(limit, ahead, monkeypatch):
  digits, started, rows = data.digits("train"), [], 32  # 64 bytes of pixels, 4 of a label
  whole = take(data.train_batches(digits, rows, num_threads=4), 12)
  monkeypatch.setattr(pipeline, "_AHEAD_BYTES", limit + 2 * 3 * rows)

  def load(indices, draws):
    started.append(len(indices))
    return digits.load(indices, draws)

  batches = data.train_batches(digits._replace(load=load), rows, num_threads=4)
  for used, batch in enumerate(take(batches, 12), 1):
    assert_equal(batch, whole[used - 1])
  assert 12 * rows <= sum(started) <= (12 + ahead) * rows
  parts = -(-4 // ahead)  # of a batch, so that every thread has one
  assert {*started} == {len(x) for x in np.array_split(np.arange(rows), parts)}


def test_every_epoch_shows_every_example_once_in_a_new_order():
  ids = np.arange(96, dtype=np.uint8).reshape(-1, 1, 1, 1)
  dataset = from_arrays(DatasetInfo("ids", (1, 1, 1), 96, (0,), (1,)), ids, ids.ravel())
  labels = join(take(data.train_batches(dataset, 8), 36))["label"].reshape(3, 96)
  for epoch in labels:
    assert sorted(epoch) == list(range(96))
  assert not np.array_equal(labels[0], labels[1])
  other = join(take(data.train_batches(dataset, 8, seed=1), 12))["label"]
  assert not np.array_equal(labels[0], other)


@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000])
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_evaluation_shows_every_example_once(batch_size, num_hosts):
  dataset = data.digits("test")
  batch_size *= num_hosts
  shards = [(i, num_hosts) for i in range(num_hosts)]
  hosts = [list(data.eval_batches(dataset, batch_size, shard=shard)) for shard in shards]
  assert len({len(h) for h in hosts}) == 1
  seen = join([join(list(parts)) for parts in zip(*hosts, strict=True)])
  assert seen["mask"].sum() == 360
  kept = {k: v[seen["mask"]] for k, v in seen.items() if k != "mask"}
  assert_equal(kept, dataset.load(np.arange(360), None))


def test_draws_are_uniform_and_independent():
  draws = augment.uniform(0, np.arange(50_000))
  assert draws.shape == (50_000, NUM_DRAWS) and draws.min() >= 0 and draws.max() < 1
  assert draws.mean() == pytest.approx(1 / 2, abs=1e-3)
  assert draws.var() == pytest.approx(1 / 12, abs=1e-3)
  histogram = np.histogram(draws, 100, (0, 1))[0]
  expected = draws.size / 100
  chi2 = ((histogram - expected) ** 2 / expected).sum()
  assert chi2 < 160  # 99 degrees of freedom: 1 in 10,000 is above
  for lag in (draws[:-1, 0], draws[:-1, 5]):
    assert abs(np.corrcoef(lag, draws[1:, 0])[0, 1]) < 0.02
  assert not np.allclose(draws, augment.uniform(1, np.arange(50_000)))


def test_shift_and_flip_equal_the_plain_loop():
  rng = np.random.default_rng(0)
  images = rng.integers(0, 255, (50, 9, 7, 2)).astype(np.uint8)
  draws = augment.uniform(0, np.arange(50), 3)
  got = augment.compose(augment.flip(), augment.shift(2)).apply(images, draws)
  for image, d, out in zip(images, draws, got, strict=True):
    if d[0] < 0.5:
      image = image[:, ::-1]
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
    top, left = int(d[1] * 5), int(d[2] * 5)
    np.testing.assert_array_equal(out, padded[top : top + 9, left : left + 7])


def test_crop_boxes_follow_inceptions_rule():
  draws = augment.uniform(0, np.arange(4000))
  height, width = 375, 500
  boxes = np.array([augment.crop_box(height, width, d) for d in draws])
  top, left, h, w = boxes.T
  assert (top >= 0).all() and (left >= 0).all()
  assert (top + h <= height).all() and (left + w <= width).all()
  areas, aspects = h * w / (height * width), w / h
  assert areas.min() > 0.075 and areas.max() <= 1.0
  assert aspects.min() > 0.74 and aspects.max() < 1.35
  for box, d in zip(boxes[:300], draws, strict=False):  # the rule as a plain loop
    for k in range(10):
      area = height * width * (0.08 + 0.92 * d[1 + k])
      aspect = (4 / 3) ** (2 * d[11 + k] - 1)
      w, h = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
      if w <= width and h <= height:
        assert tuple(box[2:]) == (h, w)
        break
  # No box of a 1000 x 10 strip has an allowed aspect and 8 % of its area.
  assert augment.crop_box(1000, 10, draws[0]) == (493, 0, 13, 10)


def encoded(image, kind, **options):
  out = io.BytesIO()
  image.save(out, kind, **options)
  return out.getvalue()


def test_decoders_agree_on_a_real_photo(photo):
  photo = photo[:300, :400]
  image = Image.fromarray(photo)
  data_jpeg = encoded(image, "JPEG", quality=95)
  pillow = np.asarray(Image.open(io.BytesIO(data_jpeg)))
  ours, kind = jpeg.decode(data_jpeg, 3)
  assert kind == "JPEG"
  assert np.abs(ours.astype(int) - pillow).mean() < 2.5  # fast chroma upsampling
  for kind in ("PNG", "BMP"):
    np.testing.assert_array_equal(jpeg.decode(encoded(image, kind), 3)[0], photo)
  assert jpeg.decode(data_jpeg, 1)[0].shape == (300, 400, 1)
  cmyk, _ = jpeg.decode(encoded(image.convert("CMYK"), "JPEG", quality=95), 3)
  assert np.abs(cmyk.astype(int) - photo).mean() < 6
  for content in (b"not an image", b"\xff\xd8\xff\xe0 torn"):
    with pytest.raises(ValueError, match="readable"):
      jpeg.decode(content, 3)


def test_views_are_cut_where_the_boxes_say(photo):
  photo = photo[:300, :400]
  data_png = encoded(Image.fromarray(photo), "PNG")
  mlperf = jpeg.decode_view(encoded(Image.fromarray(photo[:256]), "PNG"), 224, 3, None)[0]
  np.testing.assert_array_equal(mlperf, photo[16:240, 88:312])
  draws = augment.uniform(0, np.arange(8))
  views = [jpeg.decode_view(data_png, 64, 3, d)[0] for d in draws]
  assert all(v.shape == (64, 64, 3) for v in views)
  for view, d in zip(views, draws, strict=True):
    flipped = np.concatenate([[1 - d[0]], d[1:]])
    np.testing.assert_array_equal(view[:, ::-1], jpeg.decode_view(data_png, 64, 3, flipped)[0])


def test_synthetic_is_stable_and_split():
  train = data.synthetic(100, (5, 5, 3), 4)
  test = data.synthetic(10, (5, 5, 3), 4, first=100)
  a, b = train.load(np.arange(100), None), train.load(np.arange(50, 60), None)
  np.testing.assert_array_equal(a["image"][50:60], b["image"])
  assert not np.array_equal(test.load(np.arange(10), None)["image"], a["image"][:10])
  assert set(a["label"]) == {0, 1, 2, 3}


@pytest.mark.filterwarnings("ignore")  # protobuf and TFDS warn of each other
def test_tfds_by_name(tmp_path, photo):
  patches = [Image.fromarray(photo[i * 8 : i * 8 + 32, :32]) for i in range(20)]
  records = [example(encoded(patch, "PNG"), i % 2) for i, patch in enumerate(patches)]
  write_tfds(tmp_path, "patches", "array_record", {"train": [records]}, num_classes=2)
  read = functools.partial(data.tfds_images, "patches", data_dir=str(tmp_path))
  plain = read("train", image_size=32)
  cached = read("train", image_size=32, cache=True)
  assert plain.num_examples == 20 and plain.info.num_classes == 2
  rows = np.array([3, 1, 7])
  assert_equal(plain.load(rows, None), cached.load(rows, None))
  assert plain.load(rows, None)["image"].shape == (3, 32, 32, 3)
  for augmentation, size in (("crop", 16), ("shift_flip", 32)):
    augmented = read("train", image_size=size, augment=augmentation)
    draws = augment.uniform(0, rows, augmented.num_draws)
    images = augmented.load(rows, draws)["image"]
    assert images.shape == (3, size, size, 3)
    assert size == 16 or not np.array_equal(images, plain.load(rows, None)["image"])
  with pytest.raises(ConfigError, match="'trian'"):
    read("trian")


@pytest.mark.filterwarnings("ignore")
def test_tfds_mistakes_are_one_line(tmp_path):
  near, prepare = "did you mean 'fashion_mnist'", "jaxscale prepare fashion_mnist"
  for name, hint in (("fashion_mnst", near), ("fashion_mnist", prepare), ("glue", "glue")):
    with config_error(match=hint):
      data.tfds_images(name, "train", data_dir=str(tmp_path))


# Arrays.

X = np.random.default_rng(0).integers(0, 255, (40, 8)).astype(np.uint8)
Y = np.arange(40) % 3
ARRAYS = {"x": X, "y": Y}


CHANGED = [
  ({"x": X.astype("i8") + 1_700_000_000_000}, "Arrays.x has 1700000000"),
  ({"x": X.astype("f8") * 1e300}, "which float32 cannot represent; subtract an offset"),
  ({"x_eval": (X / 255).astype("f4"), "y_eval": Y}, "x_eval has float32 values from 0 to"),
  ({"x": X / 255, "x_eval": X, "y_eval": Y}, "but Arrays.x has float64 values from 0 to "),
  ({"x_eval": X + 0.5, "y_eval": Y}, "which uint8 cannot represent"),
  ({"x_eval": X.astype("i4") + 9, "y_eval": Y}, "Arrays.x_eval has 25"),
  ({"x": X * 1.0, "x_eval": X.astype("i8") + 2**24, "y_eval": Y}, "x_eval has 167"),
  ({"y": Y + 2**31}, "Arrays.y has 2147483648, which int32 cannot represent"),
  ({"y": Y.astype("u8") + np.uint64(2**63)}, "Arrays.y has 9223372036854775808"),
  ({"y": Y * 1e300}, "targets has 1e+300"),
  ({"x": X + np.array([1, np.nan] * 4)}, "Arrays.x has NaN or infinite"),
  ({"x_eval": np.diag([1.0, 2, np.inf] + [4] * 5), "y_eval": Y[:8]}, "first in row 2"),
  ({"x": {"a": X, "b": Y[:9]}}, "Arrays: arrays of {'a': 40, 'b': 9, 'label': 40} examples; give"),
  ({"x": (row for row in X)}, "Arrays.x=generator is not an array"),
  ({"x": [[1, 2], [3]]}, "Arrays.x has rows of different lengths"),
  ({"x": [["a"], ["b"]]}, "Arrays.x has the dtype <U1"),
  ({"y": Y[:39]}, "Arrays: arrays of {'x': 40, 'y': 39} examples; give"),
  ({"x_eval": X, "y_eval": Y[:9]}, "Arrays: arrays of {'x_eval': 40, 'y_eval': 9} examples; give"),
  ({"x": X[:1], "y": Y[:1]}, "leaves no example for training"),
  ({"std": (0.0,)}, "Arrays.std=(0.0,): give one number, or 8 for 8 ch"),
  ({"std": (float("nan"),)}, "Arrays.std=(nan,)"),
  ({"mean": ()}, "Arrays.mean=()"),
  ({"x": np.ma.masked_less(X, 9)}, "Arrays.x has masked values"),
  ({"y": np.where(Y == 1, np.nan, Y)}, "Arrays.y has NaN or infinite values, first in"),
  ({"x_eval": X, "y_eval": np.diag([np.inf] * 40)}, "Arrays.y_eval has NaN"),
  ({"x": X[:, :0]}, "Arrays.x has the shape (40, 0), without numbers"),
  ({"x_eval": X[:, :3], "y_eval": Y}, "Arrays.x_eval has examples of uint8[3], but Arrays.x of"),
  ({"x_eval": X, "y_eval": Y[:, None]}, "Arrays.y_eval has examples of int32[1], but Arrays.y"),
  ({"x_eval": X, "y_eval": Y / 2}, "Arrays.y_eval has examples of float64[], but Arrays.y"),
  ({"y": Y / 2, "x_eval": X, "y_eval": Y}, "has examples of int32[], but Arrays.y of float64[]"),
  ({"x": X / 255, "x_eval": X * 1.0, "y_eval": Y}, "Arrays.x has float64 values from 0 to 0"),
]


@pytest.mark.parametrize("changed, hint", CHANGED, ids=range(31))
def test_arrays_that_would_be_changed_are_refused_in_one_line(changed, hint):
  with config_error(hint):
    data.Arrays(**ARRAYS | changed).build()


TAKEN = [X, X.astype("i8"), X.astype("u8"), X / 7, X.astype("f2"), X > 9, X.tolist()]


@pytest.mark.parametrize("x", TAKEN, ids=range(7))
def test_arrays_that_lose_nothing_are_taken(x):
  train, held_out = data.Arrays(x=x, y=Y.astype("u8")).build()
  loaded = [d.load(np.arange(d.num_examples), None) for d in (train, held_out)]
  known = np.asarray(x)
  known = known.astype("f4") if known.dtype.kind == "f" else known
  np.testing.assert_array_equal(join(loaded)["image"], known)
  assert loaded[0]["label"].dtype == np.int32 and train.notes == ()


def test_sorted_arrays_say_what_is_not_trained_on():
  train, _ = data.Arrays(x=X, y=np.arange(40) // 4).build()
  last = "; validation takes the last examples, so shuffle x and y together"
  assert train.notes == (
    f"Arrays: no training example has target 9, but 4 of 4 validation examples do{last}",
    f"Arrays: no validation example has target 0, 1, 2, 3 and 5 more{last}",
  )
  train, _ = data.Arrays(x=X, y=Y, x_eval=X, y_eval=Y + 1).build()
  assert train.notes[0].endswith("has target 3, but 13 of 40 validation examples do")
  assert data.Arrays(x=X, y=X[:, 0] * 1.0).build()[0].notes == ()  # numbers
  says = (
    "Arrays: no example has target 0; the 4 classes include all numbers up to the largest target"
  )
  assert data.Arrays(x=X, y=Y + 1).build()[0].notes == (says,)
  assert data.Arrays(x=X, y=Y + 1, num_classes=4).build()[0].notes == ()


LOADS = [
  (lambda i, d: (X[i], Y[i]), "mine: load returned tuple; return a dict"),
  (lambda i, d: {"image": X[i]}, "returned ['image']; return"),
  (lambda i, d: {"image": X[i], "label": Y[i], "w": Y[i]}, "['image', 'label', 'w']"),
  (lambda i, d: {"image": X[i].tolist(), "label": Y[i]}, "returned 'image' as list"),
  (lambda i, d: int("no"), "load failed with ValueError: invalid literal"),
  (lambda i, d: {"image": X[i, :4], "label": Y[i]}, "'image' of (1, 4), uint8 for one"),
  (lambda i, d: {"image": X[i] / 9, "label": Y[i]}, "float64 for one example"),
  (lambda i, d: {"image": X[i], "label": Y[i][:, None]}, "'label' of (1, 1), int64"),
]


@pytest.mark.parametrize("load, hint", LOADS, ids=range(8))
def test_a_load_that_returns_something_else_is_one_line(load, hint):
  info = data.array_info(X, Y)._replace(name="mine")
  data.check_readable(data.Dataset(info, 40, lambda i, d: {"image": X[i], "label": Y[i]}))
  with config_error(hint):
    data.check_readable(data.Dataset(info, 40, load))


def test_a_batch_that_a_device_does_not_hold_is_refused():
  batch = {"image": np.zeros((8, 2)), "label": np.arange(8), "mask": np.ones(8, bool)}
  (held,) = data.to_device([batch], make_mesh())
  assert held["label"].dtype == np.int32
  for name, value in (("image", 1e300), ("label", 2**31), ("label", -(2**40))):
    wrong = batch | {name: np.full_like(batch[name], value)}
    with pytest.raises(ConfigError, match=rf"batch\['{name}'\] has .* cannot represent"):
      list(data.to_device([wrong], make_mesh()))


@pytest.mark.parametrize("model", ["CNN", "ResNet", "ViT"])
def test_a_model_of_images_takes_no_rows_of_numbers(model):
  context = cfg.ModelContext(info=data.array_info(X, Y))
  with pytest.raises(ConfigError, match=f"{model} takes images .*not .n, 8.; use MLP"):
    getattr(cfg, model)().build(context)
