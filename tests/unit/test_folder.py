"""Class subdirectories of image files, and files of them that are damaged."""

import io
import os

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxscale import data
from jaxscale.data import augment, encoded, jpeg
from jaxscale.data.folder import listing
from jaxscale.errors import ConfigError
from jaxscale.training import losses
from support.errors import config_error
from support.images import jpeg_bytes


@pytest.fixture
def folder(tmp_path, photo):
  """40 photos of 4 classes; "b/03" … in an order no file system keeps."""
  root = tmp_path / "train"
  for i in np.random.default_rng(0).permutation(40):
    name = root / "dbca"[i % 4] / f"{i:02}.JPEG"
    name.parent.mkdir(parents=True, exist_ok=True)
    name.write_bytes(jpeg_bytes(photo[i * 5 : i * 5 + 48, i * 5 : i * 5 + 64]))
  (root / "empty_class").mkdir()
  (root / "a" / "README.txt").write_text("not an image, and not named as one")
  return root


def test_a_folder_is_sorted_by_class_and_name(folder):
  dataset = data.image_folder(folder, image_size=16)
  batch = dataset.load(np.arange(40), None)
  assert dataset.num_examples == 40 and dataset.info.num_classes == 4
  assert batch["label"].tolist() == [0] * 10 + [1] * 10 + [2] * 10 + [3] * 10
  files = sorted(folder.rglob("*.JPEG"))
  for image, file in zip(batch["image"], files, strict=True):
    np.testing.assert_array_equal(image, jpeg.decode_view(file.read_bytes(), 16, 3, None)[0])
  held_out = data.image_folder(folder, image_size=16, classes=["z", "d", "c", "b", "a"])
  assert held_out.info.num_classes == 5
  assert held_out.load(np.array([0, 39]), None)["label"].tolist() == [4, 1]


def test_another_size_reads_nothing_again_and_a_new_file_is_seen(folder, photo):
  before = listing(folder)
  data.image_folder(folder, image_size=16, augment="crop")
  larger = data.image_folder(folder, image_size=24, augment="crop")
  assert listing(folder) is before
  draws = augment.uniform(0, np.arange(2))
  assert larger.load(np.arange(2), draws)["image"].shape == (2, 24, 24, 3)
  (folder / "a" / "more").mkdir()
  assert data.image_folder(folder, image_size=16).num_examples == 40
  for i, name in enumerate(("99.JPEG", "more/00.JPEG"), 41):
    (folder / "a" / name).write_bytes(jpeg_bytes(photo[:48, :64]))
    assert data.image_folder(folder, image_size=16).num_examples == i


def put(root, *names, kind="JPEG", level=9):
  """Files of a small image."""
  for name in names:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((20, 20, 3), level, np.uint8)).save(root / name, kind)


IMAGES = ("0.jpg", "3.JFIF", "4.jpe", "5", "b/1.jpg", "b/b/2.jpeg", "b-c/0.jpg", "z y/1.JPG")
HIDDEN = ("._0.jpg", ".DS_Store", "Thumbs.db", "desktop.ini", "__MACOSX/0.jpg", "b/._1.jpg")


def test_images_in_folders_of_a_class_are_its_images(tmp_path):
  put(tmp_path, *(f"{c}/{name}" for c in "ab" for name in IMAGES))
  put(tmp_path, "__MACOSX/a/0.jpg", ".git/a/0.jpg", *(f"a/{n}" for n in HIDDEN))
  put(tmp_path, "a/b/6.avif", kind="AVIF")
  put(tmp_path, "a/7.pgm", kind="PPM")
  (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
  (tmp_path / "b" / "link").symlink_to(tmp_path / "a" / "b" / "b")
  made = data.image_folder(tmp_path, image_size=8)
  found = listing(tmp_path)
  assert found.classes == ("a", "b") and made.damaged.count == 0
  classes = [found.classes[label] for label in found.labels]
  names = [f"{c}/{file.decode()}" for c, file in zip(classes, found.files, strict=True)]
  expected = [f"a/{n}" for n in (*IMAGES, "7.pgm", "b/6.avif")]
  expected += [f"b/{n}" for n in (*IMAGES, "link/2.jpeg")]
  # torchvision 0.28 datasets/folder.py, `make_dataset`, visits folders in this order.
  assert names == sorted(expected, key=lambda n: n.rpartition("/")[::2])
  labels = made.load(np.arange(made.num_examples), None)["label"]
  np.testing.assert_array_equal(labels, found.labels)
  assert made.damaged.count == 0 and not made.damaged.unusual


def test_a_note_counts_what_a_folder_of_images_leaves_out(folder):
  (folder / "b" / "more").mkdir()
  for name in ("b/more/x.heic", "b/y.HEIC", "b/LICENSE", "b/.secret", "list.csv"):
    (folder / name).write_bytes(b"BM, P5 and other words")
  (folder / "b" / "._y.heic").touch()
  os.mkfifo(folder / "b" / "pipe.jpg")
  for place in (folder, folder / "b"):
    (place / "loop").symlink_to("loop")
  made = data.image_folder(folder, image_size=16)
  note = made.notes[-1]
  assert made.num_examples == 40 and f"{folder}: skipping 9 files (2 .heic, " in note
  assert note.endswith("or have no ending")
  left_out = {".heic": 2, "without an ending": 2, ".txt": 1, "hidden": 1}
  left_out |= {"device or pipe": 1, "outside of class directories": 2}
  assert listing(folder).left_out == left_out


def test_classes_one_level_deeper_are_named(tmp_path):
  put(tmp_path, "tiny/n1/images/0.JPEG", "tiny/n2/images/0.JPEG")
  (tmp_path / "tiny" / "n1" / "n1_boxes.txt").touch()
  tiny = data.image_folder(tmp_path / "tiny", image_size=8)  # Tiny ImageNet's layout
  assert tiny.num_examples == 2 and "1 .txt" in tiny.notes[0]
  put(tmp_path, "val/images/0.JPEG")
  with pytest.raises(ConfigError, match="to the directories of their classes"):
    data.image_folder(tmp_path / "val", image_size=8, classes=tiny.info and ("n1", "n2"))
  put(tmp_path, "zip/train/a/0.jpg", "zip/train/b/0.jpg")
  with pytest.raises(ConfigError, match=r"use .*zip/train if those are the classes"):
    data.image_folder(tmp_path / "zip", image_size=8)
  put(tmp_path, "flat/0.jpg", "flat/1.jpg")
  with pytest.raises(ConfigError, match="2 outside of class directories"):
    data.image_folder(tmp_path / "flat", image_size=8)


def test_a_class_has_one_name_in_both_unicode_forms(tmp_path):
  composed, parts = "b\u00fccher", "bu\u0308cher"
  put(tmp_path, f"train/{composed}/0.jpg", "train/a/0.jpg")
  put(tmp_path, f"val/{parts}/0.jpg", "val/a/0.jpg")
  classes = data.folder_classes(tmp_path / "train")
  made = data.image_folder(tmp_path / "val", image_size=8, classes=classes)
  assert made.load(np.arange(2), None)["label"].tolist() == [0, 1] and not made.notes
  put(tmp_path, f"val/{composed}/0.jpg")
  with pytest.raises(ConfigError, match=r"b\\xfccher.*merge the two directories"):
    data.image_folder(tmp_path / "val", image_size=8, classes=classes)


def test_a_folder_that_may_not_be_read_is_one_line(tmp_path, monkeypatch):
  put(tmp_path, "a/0.jpg", "a/in/0.jpg")
  scandir = os.scandir

  def refuse(path):
    if str(path).endswith("in"):
      raise PermissionError(13, "Permission denied", path)
    return scandir(path)

  monkeypatch.setattr(os, "scandir", refuse)  # root may read everything
  with pytest.raises(ConfigError, match="a/in cannot be read; change its permissions"):
    data.image_folder(tmp_path, image_size=8)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_images_of_any_channels_with_their_own_mean_and_std(tmp_path, photo, channels, mode):
  (tmp_path / "a").mkdir()
  Image.fromarray(photo[:40, :50]).convert(mode).save(tmp_path / "a" / "1.png")
  options = dict(image_size=16, channels=channels, augment="crop")
  mean, std = (10.0,) * channels, (20.0,)
  dataset = data.image_folder(tmp_path, mean=mean, std=std, **options)
  info = dataset.info
  assert (info.image_shape, info.mean, info.std) == ((16, 16, channels), mean, std)
  for draws in (None, augment.uniform(0, np.arange(1))):
    assert dataset.load(np.arange(1), draws)["image"].shape == (1, 16, 16, channels)
  assert dataset.damaged.count == 0
  with pytest.raises(ConfigError, match=f"give one number, or {channels}"):
    data.image_folder(tmp_path, mean=(1.0, 2.0), **options)


def test_mistakes_with_a_folder_are_one_line(folder, tmp_path):
  (tmp_path / "nothing").mkdir()
  for directory, classes, hint in (
    (tmp_path / "no", None, "no such directory"),
    (tmp_path / "nothing", None, "no images in 0 subdirectories"),
    (folder / "a", None, "no images in 0 subdirectories"),
    (folder, ["a", "b", "c"], "/d: not a class of the training data, give one of a, b, c; "),
  ):
    with config_error(match=hint):
      data.image_folder(directory, image_size=16, classes=classes)


# Damage.


@pytest.fixture
def damaged(folder):
  """Five of the forty: truncated, empty, no image, broken link, torn PNG."""
  files = sorted(folder.rglob("*.JPEG"))
  whole = files[3].read_bytes()
  files[3].write_bytes(whole[: len(whole) // 2])
  files[4].write_bytes(b"")
  files[17].write_text("<html>404 Not Found</html>")
  files[30].unlink()
  files[30].symlink_to("/nonexistent")
  out = io.BytesIO()
  Image.open(files[0]).save(out, "PNG")
  files[39].write_bytes(out.getvalue()[: out.tell() // 2])
  return folder, [3, 4, 17, 30, 39], {3: 5, 4: 5, 17: 18, 30: 31, 39: 0}


@pytest.mark.parametrize("cache", [False, True])
def test_five_damaged_files_train_on_and_are_counted(damaged, cache):
  root, wrong, _ = damaged
  options = {"image_size": 16, "augment": "flip" if cache else "crop", "cache": cache}
  dataset = data.image_folder(root, **options)
  batches = data.train_batches(dataset, 8)
  for _ in range(15):  # three epochs
    assert next(batches)["label"].min() >= 0
  assert dataset.damaged.count == 5 and dataset.damaged.indices == wrong
  line = dataset.damaged.describe()
  assert line.startswith("5 damaged examples: a/") and line.count(".JPEG") == 5
  assert not dataset.damaged.unusual


@pytest.mark.parametrize("cache", [False, True])
def test_the_next_readable_one_stands_in_for_any_number_of_hosts(damaged, cache):
  root, _, instead = damaged
  dataset = data.image_folder(root, image_size=16, augment="flip", cache=cache)
  draws = augment.uniform(0, np.arange(40), dataset.num_draws)
  batch = dataset.load(np.arange(40), draws)
  for index, other in instead.items():
    known = dataset.load(np.array([other]), draws[[index]])
    np.testing.assert_array_equal(batch["image"][index], known["image"][0])
    assert batch["label"][index] == known["label"][0]
  whole = next(data.train_batches(dataset, 40))
  hosts = [next(data.train_batches(dataset, 40, shard=(i, 4))) for i in range(4)]
  for key in whole:
    np.testing.assert_array_equal(whole[key], np.concatenate([h[key] for h in hosts]))


@pytest.mark.parametrize("cache", [False, True])
def test_a_damaged_held_out_example_counts_once_and_is_wrong(damaged, cache):
  root, wrong, _ = damaged
  dataset = data.image_folder(root, image_size=16, cache=cache)
  batches = list(data.eval_batches(dataset, 16))
  labels = np.concatenate([b["label"][b["mask"]] for b in batches])
  assert np.flatnonzero(labels == encoded.NO_CLASS).tolist() == wrong
  totals_of = losses.classification_totals(lambda p, s, x, *_: (x, s))
  hits = examples = 0
  for batch in batches:  # a model that knows every answer
    logits = 9.0 * (batch["label"][:, None] % 4 == np.arange(4)).astype(np.float32)
    batch = {"image": jnp.asarray(logits)} | {k: batch[k] for k in ("label", "mask")}
    totals = totals_of({}, {}, batch)
    hits += int(totals["accuracy"])
    examples += int(totals["examples"])
    assert np.isfinite(totals["loss"])
  assert (hits, examples) == (35, 40)


def test_odd_files_are_read_and_counted_apart(folder, photo):
  files = sorted(folder.rglob("*.JPEG"))
  image = Image.fromarray(photo[:48, :64])
  image.convert("CMYK").save(files[1], "JPEG", quality=95)
  image.save(files[2], "PNG")
  image.convert("L").save(files[3], "JPEG", quality=95)
  image.convert("LA").save(folder / "d" / "z.png")  # a PNG that says so
  dataset = data.image_folder(folder, image_size=42)
  for _ in range(2):
    batch = dataset.load(np.arange(41), None)
  assert dataset.damaged.count == 0
  assert dataset.damaged.unusual == {"CMYK": 1, "PNG named JPEG": 1}
  reported = "0 damaged examples; also read: 1 CMYK and 1 PNG named JPEG"
  assert dataset.damaged.describe() == reported
  views = batch["image"].astype(int)
  assert np.abs(views[1] - views[2]).mean() < 6
  assert (views[3] == views[3][..., :1]).all()


def test_a_disk_that_is_gone_stops_the_run(folder):
  dataset = data.image_folder(folder, image_size=16, augment="crop")
  for file in folder.rglob("*.JPEG"):
    file.unlink()
  with pytest.raises(ConfigError, match="40 examples in a row cannot be read"):
    next(data.train_batches(dataset, 8))
  with pytest.raises(ConfigError, match="no images in"):
    data.image_folder(folder, image_size=16, cache=True)


def test_pictures_of_one_size_are_known_by_their_pixels(tmp_path):
  found = []
  for level in (9, 9, 90):
    put(tmp_path, "a/0.bmp", "a/1.bmp", "b/0.bmp", kind="BMP", level=level)
    found.append(data.image_folder(tmp_path, image_size=8).identity())
  assert found[0] == found[1] and found[0]["sizes"] == found[2]["sizes"]
  assert found[0] != found[2]
