"""The doctor says what is there, what is not, and what to do next."""

import re
import shutil

import pytest

from jaxscale import cli
from jaxscale.data import partial_jpeg
from jaxscale.jobs.preflight import imagenet
from support.images import example, jpeg_bytes, write_tfds
from support.tables import table

pytestmark = pytest.mark.filterwarnings("ignore")  # protobuf and TFDS warn


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
  """ImageNet, were it tiny."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.setattr(imagenet, "IMAGENET_EXAMPLES", {"train": 12, "validation": 4})
  monkeypatch.setattr(imagenet, "NUM_CLASSES", 2)


@pytest.fixture(scope="module")
def images(photo):
  return [jpeg_bytes(photo[i : i + 48, i : i + 64]) for i in range(16)]


def prepare(root, images, file_format="tfrecord", train=12):
  records = [example(image, i % 2) for i, image in enumerate(images)]
  splits = {"train": [records[:5], records[5:train]], "validation": [records[12:]]}
  options = {"num_classes": 1000, "version": "5.1.0"}
  return write_tfds(root, "imagenet2012", file_format, splits, **options)


def ask(capsys, *args):
  code = cli.main(["doctor", "imagenet", *map(str, args)])
  out = capsys.readouterr()
  assert "Traceback" not in out.err
  return code, out.out


def next_lines(reported):
  return [line for line in reported.splitlines() if line.startswith("fix ")]


@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
def test_what_is_prepared_is_ready(tmp_path, capsys, images, file_format):
  prepare(tmp_path, images, file_format)
  code, reported = ask(capsys, "--data-dir", tmp_path)
  assert code == 0, reported
  assert f"imagenet2012 5.1.0 in {tmp_path}" in reported and file_format in reported
  assert "train: 12 examples" in reported and "validation: 4 examples" in reported
  assert "train: 2 files" in reported and "images/s per core" in reported
  assert "sample of 12: 0 damaged examples" in reported
  assert partial_jpeg.library().text in reported
  assert "fix  " not in reported and reported.endswith("imagenet: ready\n")


def test_nothing_there_says_what_to_download_then_to_prepare(tmp_path, capsys):
  code, reported = ask(capsys, "--data-dir", tmp_path)
  assert code == 2 and "is not prepared in" in reported
  (step,) = next_lines(reported)
  assert "register at image-net.org" in step and "img_train.tar and ILSV" in step
  assert step.endswith(f"imagenet2012 --manual-dir DIR --data-dir {tmp_path}")


HARM = [
  (lambda file: file.unlink(), "1 of 2 files missing or empty"),
  (lambda file: file.write_bytes(b""), "1 of 2 files missing or empty"),
  # TFDS opens an array_record file only to read from it: the sample finds out.
  (lambda f: f.write_bytes(f.read_bytes()[:-900]), "truncated|7 damaged examples"),
]


@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
@pytest.mark.parametrize("harm, says", HARM)
def test_a_lost_or_cut_shard_is_not_ready(tmp_path, capsys, images, file_format, harm, says):
  folder = prepare(tmp_path, images, file_format)
  harm(folder / f"imagenet2012-train.{file_format}-00001-of-00002")
  code, reported = ask(capsys, "--data-dir", tmp_path)
  assert code == 2 and re.search(says, reported) and "copy" in next_lines(reported)[0]
  assert "image-net.org" not in reported  # a copy needs no archives


def test_a_subset_or_damage_is_not_ready(tmp_path, capsys, images):
  prepare(tmp_path / "few", images, train=10)
  code, reported = ask(capsys, "--data-dir", tmp_path / "few")
  assert code == 2 and "train: 10 examples, ImageNet has 12" in reported
  images = [*images[:3], b"no image", *images[4:]]
  prepare(tmp_path / "torn", images)
  code, reported = ask(capsys, "--data-dir", tmp_path / "torn")
  assert code == 2 and "1 damaged example: imagenet2012 'train' example 3" in reported


def test_mistakes_are_one_line(capsys):
  for argv, says in table("""
    imagenet --folder=. --sample=0 | --sample=0: give a whole number >= 1
    imagenet --folder=. --sample=-1 | --sample=-1: give a whole number >= 1
    imagnet | imagnet: did you mean 'imagenet'?
"""):
    assert cli.main(["doctor", *argv.split()]) == 2
    assert capsys.readouterr() == ("", f"error: {says}\n")


def unpack(root, images):
  for i, image in enumerate(images):
    file = root / ("train" if i < 12 else "val") / f"n{i % 2}" / f"{i}.JPEG"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(image)


def test_a_folder_is_ready_or_says_what_it_lacks(tmp_path, capsys, images):
  unpack(tmp_path, images)
  code, reported = ask(capsys, "--folder", tmp_path)
  assert code == 0 and "train: 2 classes" in reported and "validation: 4 examples" in reported
  (tmp_path / "train" / "n1" / "3.JPEG").write_bytes(images[3][:500])
  code, reported = ask(capsys, "--folder", tmp_path)
  assert code == 2 and "sample of 12: 1 damaged example: n1/3.JPEG" in reported
  (tmp_path / "train" / "n1" / "3.JPEG").unlink()
  shutil.move(tmp_path / "val" / "n1", tmp_path / "val" / "n7")
  code, reported = ask(capsys, "--folder", tmp_path)
  assert code == 2 and "train: 11 examples, ImageNet has 12" in reported
  assert "different class names" in reported
  shutil.rmtree(tmp_path / "val")
  code, reported = ask(capsys, "--folder", tmp_path)
  assert code == 2 and "no such directory" in reported and "fix   train/WNID" in reported


def test_a_folder_that_is_not_there_is_named_itself(tmp_path, capsys, images):
  code, reported = ask(capsys, "--folder", tmp_path / "no")
  assert code == 2 and reported.startswith(f"fail  {tmp_path}/no: no such directory\n")
  assert next_lines(reported) == ["fix   give the directory that holds train/ and val/ as --folder"]
  unpack(tmp_path, images)
  code, reported = ask(capsys, "--folder", tmp_path / "train")
  assert code == 2 and f"{tmp_path}/train: has neither train/ nor val/" in reported
  assert next_lines(reported) == [f"fix   give {tmp_path} as --folder"]
  shutil.rmtree(tmp_path / "train")
  (tmp_path / "val" / "n0" / "12.JPEG").unlink()
  _, reported = ask(capsys, "--folder", tmp_path)
  steps = next_lines(reported)  # training first, as it is read
  assert "train/WNID/*.JPEG" in steps[0] and f"into {tmp_path}/val" in steps[1]


def test_a_disk_that_fails_is_a_finding(tmp_path, capsys, images, monkeypatch):
  from jaxscale.data import folder

  def away(path, *args):
    raise OSError(116, "Stale file handle")

  unpack(tmp_path, images)
  monkeypatch.setattr(folder, "open", away, raising=False)
  code, reported = ask(capsys, "--folder", tmp_path)
  assert code == 2 and "train: [Errno 116] Stale file handle" in reported
  assert "follow the advice in the line about train" in next_lines(reported)[0]


def test_help_lists_the_checks(capsys):
  assert cli.main(["doctor", "--help"]) == 0
  reported = capsys.readouterr().out
  assert "doctor imagenet" in reported and "network (rate of an" in " ".join(reported.split())
