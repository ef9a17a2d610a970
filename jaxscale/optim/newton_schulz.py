"""Newton-Schulz iterations, which bring the singular values of a matrix near 1.

    x = a x + (b s + c s s) x, s = x x^T

maps every singular value z of x to a z + b z^3 + c z^5. `VARIANTS` has published
coefficients (a, b, c), one triple for all iterations or one for each. Singular values from
0.01 to 1, which is the Frobenius norm of the matrix, are mapped to

| variant | iterations | range | source |
|---|---|---|---|
| "jordan" | 5 or more | 0.68 to 1.13 | K. Jordan, "Muon", 2024 |
| "you" | 5 | 0.978 to 1.032 | J. You, in modded-nanogpt's train_gpt_medium.py (0577d67) |
| "polar_express" | 5; 6; 7 | 0.87 to 1.12; 0.997 to 1.001; 1 | arXiv:2505.16932, algorithm 1 |

Below 0.01 "polar_express" is nearest to 1: it maps 0.001 to 0.84 in 5 iterations, and the
others to 0.47. Its coefficients are optimal for values of 0.001 to 1, and each is divided by
the authors' safety factor 1.01; the first also by the factor 1.01 of their norm.

In bfloat16 an iteration reads and writes half of the bytes, and GPUs and TPUs multiply
several times as fast. K. Jordan's and J. You's code and arXiv:2505.16932 use it. Here it
changed matrices of condition 10 to 100 by 3 to 8 %, and singular values by up to 0.08
(tests/unit/test_newton_schulz.py, on a CPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.optim.layers import is_injected

Coefficients = tuple[float, float, float]

# Algorithm 1 of arXiv:2505.16932, before its safety factor.
_POLAR_EXPRESS: tuple[Coefficients, ...] = (
  (8.28721201814563, -23.595886519098837, 17.300387312530933),
  (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
  (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
  (3.3184196573706015, -2.488488024314874, 0.51004894012372),
  (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
  (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
  (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
  (1.875, -1.25, 0.375),
)


JORDAN: Coefficients = (3.4445, -4.7750, 2.0315)
_SAFETY = (1.01**2, *[1.01] * 6, 1.0)
VARIANTS: dict[str, tuple[Coefficients, ...]] = {
  "jordan": (JORDAN,),
  "you": (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
  ),
  "polar_express": tuple(
    (a / z, b / z**3, c / z**5) for (a, b, c), z in zip(_POLAR_EXPRESS, _SAFETY, strict=True)
  ),
}


def coefficients_of(given: str | Sequence[Any]) -> list[Coefficients]:
  """Return the coefficients of the iterations, of which the last is repeated.

  Args:
    given: a name in `VARIANTS`, a triple (a, b, c), or a triple for each iteration.

  Raises:
    KeyError: the name is unknown.
    ValueError: a group of coefficients is no triple.

  Example:
    >>> coefficients_of((1.5, -0.5, 0.0))
    [(1.5, -0.5, 0.0)]
    >>> len(coefficients_of("you"))
    5
  """
  if isinstance(given, str):
    return [*VARIANTS[given]]
  is_triple = all(isinstance(x, int | float) for x in given)
  triples = [tuple(x) for x in ([given] if is_triple else given)]
  if not triples or any(len(x) != 3 for x in triples):
    raise ValueError("give three coefficients of x, x^3 and x^5, or three for each iteration")
  return triples


def orthogonalize(
  matrices: jax.Array,
  steps: int,
  coeffs: str | Sequence[Any] = JORDAN,
  eps: float | None = None,
  dtype: str = "float32",
) -> jax.Array:
  """Apply the Newton-Schulz iteration to each of n matrices [n, in, out].

  Args:
    matrices: matrices, at least float32.
    steps: number of iterations.
    coeffs: coefficients, as for `coefficients_of`.
    eps: term added to the Frobenius norm, by which a matrix is divided first; None divides by
      at least 1e-7, as PyTorch does.
    dtype: "float32" iterates in the dtype of the matrices, "bfloat16" in bfloat16.

  Returns:
    Matrices of the same shape and dtype.
  """
  norms = jnp.linalg.norm(matrices, axis=(1, 2), keepdims=True)
  x = matrices / (jnp.maximum(norms, 1e-7) if eps is None else norms + eps)
  tall = x.shape[1] > x.shape[2]
  x = x.mT if tall else x  # transposed, so that s is the smaller of the two products
  x = x.astype(jnp.bfloat16) if dtype == "bfloat16" else x
  table = jnp.array(coefficients_of(coeffs), x.dtype)

  def iterate(i: Any, x: jax.Array):
    a, b, c = table[jnp.minimum(i, len(table) - 1)]
    s = x @ x.mT
    return a * x + (b * s + c * s @ s) @ x

  x = jax.lax.fori_loop(0, steps, iterate, x, unroll=None if is_injected(steps) else True)
  return (x.mT if tall else x).astype(matrices.dtype)
