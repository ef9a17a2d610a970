"""TensorBoard's event files, against protobuf's own encoding and tensorboardX's reader."""

import math

import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from jaxscale.metrics import event_file
from support.tiny_runs import events_of


@pytest.mark.parametrize("step", [1, 127, 128, 40_000_000_000])
@pytest.mark.parametrize("value", [0.25, -3e-5, math.inf, 1e39])  # protobuf: 1e39 is infinite
def test_records_are_those_of_protobuf(tmp_path, step, value):
  tag, now = "eval/größe " + 200 * "x", 1_764_000_000.125
  path = tmp_path / "events"
  path.write_bytes(event_file.header(now, step) + event_file.scalars(now, step, {tag: value}))
  version, begin, point = events_of(path)
  log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
  assert (version.file_version, version.wall_time) == ("brain.Event:2", now)
  assert begin == event_pb2.Event(wall_time=now, step=step, session_log=log)
  summary = {"value": [{"tag": tag, "simple_value": value}]}
  wanted = event_pb2.Event(wall_time=now, step=step, summary=summary)
  assert point.SerializeToString() == wanted.SerializeToString()


def test_checksums_are_tensorboards():
  for data in (b"", b"\0", bytes(range(256)), "größe".encode() * 99):
    assert event_file.masked_crc32c(data) == masked_crc32c(data)
  record = event_file.scalars(1.5, 3, {"a": 1.0})
  length = int.from_bytes(record[:8], "little")
  assert len(record) == 16 + length
  for part, end in ((record[:8], 8), (record[12 : 12 + length], 12 + length)):
    assert int.from_bytes(record[end : end + 4], "little") == masked_crc32c(part)


def test_no_values_are_no_records():
  assert event_file.scalars(1.0, 2, {}) == b""


def test_nan_stays_nan(tmp_path):
  path = tmp_path / "events"
  path.write_bytes(event_file.scalars(1.0, 2, {"loss": math.nan}))
  (event,) = events_of(path)
  assert math.isnan(event.summary.value[0].simple_value)
