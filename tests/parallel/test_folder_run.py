"""A run on a directory of images, five of them damaged."""

import pytest

from jaxscale import config as cfg
from jaxscale import data, metrics
from jaxscale.errors import ConfigError
from jaxscale.run.damaged_examples import DamageRecord
from jaxscale.run.fit import fit
from support.configs import small_config
from support.images import write_folder


def folder_config(root, **changes):
  return small_config(
    data=cfg.ImageFolder(path=str(root), image_size=16, augment="flip"),
    optimizer=cfg.SGD(lr=0.05),
    epochs=3,
    evaluation=cfg.Evaluation(every_epochs=3),
    log=cfg.Log(every_steps=1, tensorboard=False, plot=False),
    **changes,
  )


def test_five_damaged_files_are_reported_and_trained_around(tmp_path, capsys):
  paths = write_folder(tmp_path / "images", "train", 20)
  write_folder(tmp_path / "images", "val", 4)
  for path in paths[3::8]:
    path.write_bytes(path.read_bytes()[:150])
  result = fit(folder_config(tmp_path / "images"), tmp_path / "run")
  assert result.summary["outcome"] == "done"
  assert result.summary["damaged_examples"] == 5
  assert result.summary["accuracy"] == 1.0  # the classes differ in brightness
  reported = [x for x in capsys.readouterr().out.splitlines() if x.startswith("training data")]
  assert len(reported) == 1, reported
  assert reported[0].startswith("training data: 5 damaged examples: cat/003.jpg, ")
  again = fit(folder_config(tmp_path / "images"), tmp_path / "run")  # it is done
  assert again.summary["damaged_examples"] == 5


def test_damage_of_before_a_restart_still_counts(tmp_path):
  def dataset(*damaged):
    record = data.DamagedExamples()
    for i in damaged:
      record.add(i, f"{i}.jpg")
    return data.digits("train")._replace(damaged=record)

  first = DamageRecord(tmp_path, start=0)
  first.watch("training", dataset(3, 8))
  first.watch("training", dataset(8, 9))  # of another phase
  assert first.collect() == ["training data: 3 damaged examples: 3.jpg, 8.jpg and 9.jpg"]
  assert first.collect() == []  # nothing new
  second = DamageRecord(tmp_path, start=5)
  second.watch("training", dataset(3))
  second.watch("held-out", dataset())
  assert second.collect() == [] and second.count == 3
  anew = DamageRecord(tmp_path, start=0)
  anew.watch("held-out", dataset(1))
  assert anew.collect() == ["validation data: 1 damaged example: 1.jpg"]
  assert anew.count == 1


@pytest.mark.slow
def test_images_that_grow_on_the_way_need_a_model_that_lets_them(tmp_path):
  write_folder(tmp_path / "images", "train", 24)
  write_folder(tmp_path / "images", "val", 4)
  grow = cfg.Phases(epochs=(0, 1.5), image_sizes=(8, 16))
  with pytest.raises(ConfigError, match="depend on the image size"):
    fit(folder_config(tmp_path / "images", phases=grow), tmp_path / "a")
  resnet = cfg.ResNet(depth=18, width=2, stem="small")
  result = fit(folder_config(tmp_path / "images", phases=grow, model=resnet), tmp_path / "b")
  assert result.summary["outcome"] == "done"
  lines = metrics.read_json_lines(tmp_path / "b" / "metrics.jsonl")
  assert [x["step"] for x in lines if "train/loss" in x] == [*range(1, 10)]
