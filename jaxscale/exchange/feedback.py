"""What exchanges with error feedback share.

Each keeps a residual r of what it did not send, and sends of x = g + r:

    sent = C(x),   r' = x - sent     so that   sum_t sent_t + r_T = sum_t g_t

Nothing of a gradient is lost, it is late (arXiv:1809.07599, arXiv:1901.09847).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.errors import ConfigError


def zero_residuals(params: Any) -> Any:
  """Residuals before the first step: float32, shaped like the parameters."""
  return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)


def check_devices(name: str, axes: tuple[str, ...], num_devices: int) -> None:
  """Refuse an exchange made for another number of devices.

  Raises:
    ConfigError: the axes have another size.
  """
  if (found := lax.axis_size(axes)) != num_devices:
    raise ConfigError(
      f"{name}.num_devices={num_devices}: the axes {', '.join(axes)} have {found} "
      "devices, give mesh.size"
    )
