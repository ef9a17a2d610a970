"""Tiny model to plan, with the simulated devices as chips of any memory."""

import os

import jax
import pytest

from jaxscale.planning import topologies

SOURCE = """from jaxscale import config as cfg

def get_config():
  return cfg.Config(
    model=cfg.Transformer(num_layers=2, width=32, num_heads=2, hidden=64),
    data=cfg.TextFiles(path="not/here", vocab_size=500, sequence_length=16),
    optimizer=cfg.AdamW(lr=1e-3), batch_size=16, epochs=1,
    mesh=cfg.Mesh(data=1, fsdp=-1), layout=cfg.Layout(shard="fsdp"),
  )
"""


@pytest.fixture
def environment():
  """Restore the environment variables that the command sets."""
  before = dict(os.environ)
  yield
  os.environ.clear()
  os.environ.update(before)


def here(limit=1 << 40, count=8):
  """Return the simulated devices as chips with a memory limit."""
  chip = topologies.Chip("cpu", 2 * limit, limit, {})
  return topologies.Chips(f"here-{count}", chip, jax.devices()[:count], "knl", count)
