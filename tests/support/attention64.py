"""Attention and its gradients in float64, a head at a time, from the definition."""

import numpy as np


def attention64(q, k, v, dout=None, *, causal, documents=None):
  """Return the output, and the gradients of q, k and v if that of the output is given.

  Args:
    q: queries [rows, tokens, heads, width].
    k: keys [rows, tokens, groups, width], each of consecutive heads.
    v: values, as the keys.
    dout: gradient of the output.
    causal: whether a token sees only those before it, and itself.
    documents: the number of each token's document [rows, tokens]; a token sees only its own.
  """
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  (rows, tokens, heads, width), groups = q.shape, k.shape[2]
  out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
  for row, head in np.ndindex(rows, heads):
    one, other = (row, slice(None), head), (row, slice(None), head * groups // heads)
    s = q[one] @ k[other].T / np.sqrt(width)
    if causal:
      s[np.triu_indices(tokens, 1)] = -np.inf
    if documents is not None:
      s[documents[row][:, None] != documents[row]] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out[one] = p @ v[other]
    if dout is not None:
      dp = dout[one] @ v[other].T
      ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(width)
      dq[one] = ds @ k[other]
      dk[other] += ds.T @ q[one]
      dv[other] += p.T @ dout[one]
  return out if dout is None else (out, dq, dk, dv)
