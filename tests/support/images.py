"""Images, as JPEG files, TFRecords, TFDS folders and image folders."""

import io
import json
import struct

import numpy as np
from PIL import Image


def jpeg_bytes(pixels, quality=93):
  out = io.BytesIO()
  Image.fromarray(pixels).save(out, "JPEG", quality=quality)
  return out.getvalue()


def crc32c(data):
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
  return crc ^ 0xFFFFFFFF


def masked(data):
  crc = crc32c(data)
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def write_tfrecord(path, records):
  with open(path, "wb") as file:
    for record in records:
      head = struct.pack("<Q", len(record))
      # Nobody reads the second checksum; it takes seconds bit by bit.
      file.write(head + struct.pack("<I", masked(head)) + record + b"\0\0\0\0")


def write_array_record(path, records):
  from array_record.python.array_record_module import ArrayRecordWriter

  writer = ArrayRecordWriter(str(path), "group_size:1")
  for record in records:
    writer.write(record)
  writer.close()


def example(image, label):
  from tensorflow_datasets.proto import tf_example_pb2, tf_feature_pb2

  features = {
    "file_name": tf_feature_pb2.Feature(bytes_list={"value": [b"x.JPEG"]}),
    "image": tf_feature_pb2.Feature(bytes_list={"value": [image]}),
    "label": tf_feature_pb2.Feature(int64_list={"value": [label]}),
  }
  return tf_example_pb2.Example(features={"feature": features}).SerializeToString()


def write_tfds(root, name, file_format, splits, *, num_classes=10, version="1.0.0"):
  """Write a dataset as TFDS prepares it, from splits {name: records by shard}."""
  folder = root / name / version
  folder.mkdir(parents=True)
  write = {"tfrecord": write_tfrecord, "array_record": write_array_record}[file_format]
  described = []
  for split, shards in splits.items():
    for i, records in enumerate(shards):
      file = f"{name}-{split}.{file_format}-{i:05}-of-{len(shards):05}"
      write(folder / file, records)
    num_bytes = str(sum(len(r) for records in shards for r in records))
    lengths = [str(len(records)) for records in shards]
    described.append(dict(name=split, numBytes=num_bytes, shardLengths=lengths))
    described[-1]["filepathTemplate"] = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
  keys = [{"featureKey": "image"}, {"featureKey": "label"}]
  info = dict(fileFormat=file_format, name=name, splits=described, version=version)
  info["supervisedKeys"] = {"tuple": {"items": keys}}
  (folder / "dataset_info.json").write_text(json.dumps(info))
  core = "tensorflow_datasets.core.features."
  shape = {"dimensions": ["-1", "-1", "3"]}
  image = {"dtype": "uint8", "encodingFormat": "jpeg", "shape": shape}
  classes = {"numClasses": str(num_classes)}
  features = {
    "image": {"pythonClassName": core + "image_feature.Image", "image": image},
    "label": {"pythonClassName": core + "class_label_feature.ClassLabel", "classLabel": classes},
  }
  whole = {"pythonClassName": core + "features_dict.FeaturesDict"}
  whole["featuresDict"] = {"features": features}
  (folder / "features.json").write_text(json.dumps(whole))
  return folder


def write_folder(root, split, count):
  rng = np.random.default_rng(0)
  paths = []
  for label, name in enumerate(("cat", "dog")):
    (root / split / name).mkdir(parents=True)
    for i in range(count):
      noise = rng.integers(0, 90, (24, 32, 3)) + 120 * label
      path = root / split / name / f"{i:03}.jpg"
      Image.fromarray(noise.astype(np.uint8)).save(path)
      paths.append(path)
  return paths
