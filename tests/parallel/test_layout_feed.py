"""Which rows each process feeds, where several have the same."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxscale.mesh import host_shard

# Processes along the mesh, its axes, and (index, count) of each process's rows.
FEEDS = {
  "one device each, fsdp": (
    1,
    {"replica": 1, "data": 1, "fsdp": 4},
    [(0, 4), (1, 4), (2, 4), (3, 4)],
  ),
  "pairs of model have the same": (
    1,
    {"replica": 1, "data": 2, "model": 2},
    [(0, 2), (0, 2), (1, 2), (1, 2)],
  ),
  "model within a process": (2, {"replica": 1, "data": 2, "model": 2}, [(0, 2), (1, 2)]),
  "model over two processes": (
    2,
    {"replica": 1, "data": 2, "model": 4},
    [(0, 2), (0, 2), (1, 2), (1, 2)],
  ),
  "all along model": (1, {"replica": 1, "data": 1, "model": 4}, [(0, 1)] * 4),
  "stages and model": (
    1,
    {"replica": 2, "data": 1, "stage": 2, "model": 2},
    [(0, 2)] * 4 + [(1, 2)] * 4,
  ),
  "stages of two devices": (
    2,
    {"replica": 1, "data": 2, "fsdp": 1, "stage": 4},
    [(0, 2), (0, 2), (1, 2), (1, 2)],
  ),
  "several blocks a process": (
    4,
    {"replica": 1, "data": 2, "fsdp": 2, "model": 2},
    [(0, 2), (1, 2)],
  ),
}


def mesh_of(sizes, owners) -> Any:
  devices = np.array([SimpleNamespace(process_index=int(p)) for p in owners])
  shape = tuple(sizes.values())
  return SimpleNamespace(devices=devices.reshape(shape), axis_names=tuple(sizes), shape=sizes)


@pytest.mark.parametrize("name", FEEDS)
def test_processes_that_differ_along_model_feed_the_same_rows(name, monkeypatch):
  each, sizes, wanted = FEEDS[name]
  count = int(np.prod(list(sizes.values())))
  mesh = mesh_of(sizes, np.arange(count) // each)
  for process, shard in enumerate(wanted):
    monkeypatch.setattr(jax, "process_index", lambda process=process: process)
    assert host_shard(mesh) == shard


def test_rows_that_are_apart_are_refused(monkeypatch):
  """Process 0 has the first and the third block of four."""
  monkeypatch.setattr(jax, "process_index", lambda: 0)
  mesh = mesh_of({"replica": 1, "data": 4}, [0, 1, 0, 1])
  with pytest.raises(ValueError, match="order the devices by process"):
    host_shard(mesh)


def test_a_process_with_more_rows_than_another_is_refused(monkeypatch):
  monkeypatch.setattr(jax, "process_index", lambda: 0)
  mesh = mesh_of({"replica": 1, "data": 4, "model": 1}, [0, 0, 0, 1])
  with pytest.raises(ValueError, match="give each process equally many"):
    host_shard(mesh)
  # Blocks of two processes that overlap by one: 0 feeds blocks 0 and 1, 1 feeds 1.
  mesh = mesh_of({"replica": 1, "data": 2, "model": 2}, [0, 0, 0, 1])
  with pytest.raises(ValueError, match="give each process equally many"):
    host_shard(mesh)
