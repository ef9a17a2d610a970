"""What only JAX can say, in a process of its own: devices, data, the config.

XLA ends the process that has a flag it does not know, so whoever asks must not be
the one who waits for the answer. Called by `devices`; prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jaxscale.config.loading import load_config
from jaxscale.errors import ConfigError


def look(config: str | None, overrides: dict[str, str]) -> dict[str, Any]:
  """The devices of this process, tried out, and the data of a config.

  Args:
    config: `FILE[:arg]`, or None.
    overrides: of the config, as text by dotted field.
  """
  import jax
  import jax.numpy as jnp

  devices = jax.local_devices()
  wrong = []
  for device in devices:
    x = jax.device_put(jnp.arange(256.0).reshape(16, 16), device)
    # Small whole numbers: exact in float32, and in TF32 or bfloat16 products. Every
    # row has 0, 1, 2, 3 four times: 16 x 16 products of 4 x (0 + 1 + 4 + 9).
    y = jax.jit(lambda x: ((x % 4) @ (x % 4).T).sum())(x)
    if float(y) != 256 * 56:
      wrong.append(f"{device}: {float(y)}")
  found: dict[str, Any] = {
    "platform": devices[0].platform,
    "kind": devices[0].device_kind,
    "count": len(devices),
    "wrong": wrong,
  }
  if config is not None:
    from jaxscale.experiment import parts

    try:
      train, held_out = parts.make_data(load_config(config, overrides))
      found["data"] = [train.info.name, train.num_examples, held_out.num_examples]
    except (ConfigError, OSError) as e:
      found["data_error"] = str(e)
  return found


def fits(config: str, overrides: dict[str, str], workdir: str) -> dict[str, Any]:
  """Whether a config can run on the devices that this process simulates.

  Args:
    config: `FILE[:arg]`.
    overrides: of the config, as text by dotted field.
    workdir: where it may go on.

  Returns:
    {"bytes": of a checkpoint, "kept": checkpoints that lie there at most}, or
    {"error": why it cannot}.
  """
  import jax

  from jaxscale.run.workdir import experiment_in

  try:
    experiment = experiment_in(Path(workdir), load_config(config, overrides))
  except (ConfigError, OSError) as e:
    return {"error": str(e)}
  leaves = jax.tree.leaves(experiment.abstract_state())
  keep = experiment.config.checkpoint
  return {
    "bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
    # The next one is written before the oldest goes.
    "kept": keep.keep_last + keep.keep_best + 1,
  }


if __name__ == "__main__":
  what, options = sys.argv[1], json.loads(sys.argv[2])
  print(json.dumps({"look": look, "fits": fits}[what](**options)))
