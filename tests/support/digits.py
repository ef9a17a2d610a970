"""Batches that look like the handwritten digits."""

import numpy as np


def digits_batch(n: int, seed: int = 0) -> dict[str, np.ndarray]:
  """`n` rows."""
  rng = np.random.default_rng(seed)
  return {
    "image": rng.integers(0, 17, (n, 8, 8, 1)).astype(np.uint8),
    "label": rng.integers(0, 10, n).astype(np.int32),
  }
