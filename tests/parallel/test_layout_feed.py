"""Which rows each process feeds, where several have the same."""

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxscale.mesh import host_shard

# Devices of a process, the mesh's replica, data, fsdp, stage and model, and the rows of
# each process: the index of its block, of how many.
FEEDS = """
1  1 1 4 1 1  0 1 2 3          of 4
1  1 2 1 1 2  0 0 1 1          of 2  pairs of model
2  1 2 1 1 2  0 1              of 2  model within a process
2  1 2 1 1 4  0 0 1 1          of 2  model over two processes
1  1 1 1 1 4  0 0 0 0          of 1  all along model
1  2 1 1 2 2  0 0 0 0 1 1 1 1  of 2  stages and model
2  1 2 1 4 1  0 0 1 1          of 2  stages of two devices
4  1 2 2 1 2  0 1              of 2  several blocks a process
""".strip().splitlines()
AXES = ("replica", "data", "fsdp", "stage", "model")


def mesh_of(sizes, owners):
  devices = np.array([SimpleNamespace(process_index=int(p)) for p in owners])
  shape = tuple(sizes.values())
  return SimpleNamespace(devices=devices.reshape(shape), axis_names=tuple(sizes), shape=sizes)


@pytest.mark.parametrize("row", FEEDS)
def test_processes_that_differ_along_model_feed_the_same_rows(row, monkeypatch):
  numbers, _, count = row.partition(" of ")
  each, *numbers = map(int, numbers.split())
  sizes, blocks = dict(zip(AXES, numbers[:5], strict=True)), numbers[5:]
  mesh = mesh_of(sizes, np.arange(math.prod(sizes.values())) // each)
  for process, block in enumerate(blocks):
    monkeypatch.setattr(jax, "process_index", lambda process=process: process)
    assert host_shard(mesh) == (block, int(count.split()[0]))


def test_rows_that_are_apart_are_refused(monkeypatch):
  """Process 0 has the first and the third block of four."""
  monkeypatch.setattr(jax, "process_index", lambda: 0)
  mesh = mesh_of({"replica": 1, "data": 4}, [0, 1, 0, 1])
  with pytest.raises(ValueError, match="order the devices by process"):
    host_shard(mesh)


def test_a_process_with_more_rows_than_another_is_refused(monkeypatch):
  monkeypatch.setattr(jax, "process_index", lambda: 0)
  mesh = mesh_of({"replica": 1, "data": 4, "model": 1}, [0, 0, 0, 1])
  with pytest.raises(ValueError, match="give every process the same number"):
    host_shard(mesh)
  # Blocks of two processes that overlap by one: 0 feeds blocks 0 and 1, 1 feeds 1.
  mesh = mesh_of({"replica": 1, "data": 2, "model": 2}, [0, 0, 0, 1])
  with pytest.raises(ValueError, match="give every process the same number"):
    host_shard(mesh)
