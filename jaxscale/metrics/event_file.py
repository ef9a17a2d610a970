"""Records of TensorBoard's event files, without TensorBoard or protobuf.

A file is a sequence of TFRecords, each with an `Event` (tensorflow/core/util/event.proto)
whose scalars are a `Summary` (tensorflow/core/framework/summary.proto). Integers are encoded
as protobuf's base-128 varints.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping


def _crc_entry(byte: int) -> int:
  for _ in range(8):  # The Castagnoli polynomial, bits reversed (RFC 3720, appendix B.4).
    byte = byte >> 1 ^ (0x82F63B78 & -(byte & 1))
  return byte


_CRC = tuple(map(_crc_entry, range(256)))


def masked_crc32c(data: bytes) -> int:
  """Return the checksum of TFRecords (tensorflow/core/lib/hash/crc32c.h).

  Example:
    >>> hex(masked_crc32c(b"123456789"))  # The CRC-32C of these is 0xe3069283.
    '0xc78ab0e5'
  """
  crc = 0xFFFFFFFF
  for byte in data:
    crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
  crc ^= 0xFFFFFFFF
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def header(time: float, first_step: int) -> bytes:
  """Return the records that a file begins with.

  TensorBoard then drops points at `first_step` and later of earlier files, which a killed run,
  or another run, has logged.

  Args:
    time: seconds since 1970.
    first_step: the first step that will be logged.
  """
  begin = _message(7, b"\x08\x01")  # SessionLog.status = START
  return _record(time, 0, _message(3, b"brain.Event:2")) + _record(time, first_step, begin)


def scalars(time: float, step: int, values: Mapping[str, float]) -> bytes:
  """Return one record per value.

  Args:
    time: seconds since 1970.
    step: the step of the values.
    values: float32 values by tag.
  """
  records = []
  for tag, value in values.items():
    point = _message(1, tag.encode()) + b"\x15" + bytes(ctypes.c_float(value))
    records.append(_record(time, step, _message(5, _message(1, point))))
  return b"".join(records)


def _record(time: float, step: int, content: bytes) -> bytes:
  """Return a TFRecord of an Event: length, its CRC, the event, its CRC."""
  event = b"\x09" + struct.pack("<d", time) + b"\x10" + _varint(step) + content
  parts = struct.pack("<Q", len(event)), event
  return b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in parts)


def _message(field: int, content: bytes) -> bytes:
  """Return a protobuf field of bytes, text or a message."""
  return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
  return (bytes([number & 127 | 128]) + _varint(number >> 7)) if number > 127 else bytes([number])
