"""Print the golden vectors of tests/unit/test_lars.py: `python record_lars.py`.

Every published step by itself, in float64 numpy, line for line as its source has it
(the docstring of jaxscale/optim/lars_variants.py names the sources). Nothing is shared
with jaxscale, and nothing between two steps but momentum.
"""

import numpy as np
from numpy.linalg import norm

W0 = np.array([1.0, -2.0, 3.0])
GRADS = np.array([[0.1, 0.2, -0.3], [-0.2, 0.1, 0.4], [0.3, -0.1, 0.2]])
RATES = [1.0, 2.0, 4.0]
ETA, WD, M = 0.01, 0.05, 0.9
TIMM_EPS = 1e-8  # timm's default; the others have none


def paper(w, g, lr, v, before):  # arXiv:1708.03888, algorithm 1; intel/caffe
  local = ETA * norm(w) / (norm(g) + WD * norm(w))
  v = M * v + lr * local * (g + WD * w)
  return w - v, v


def corrected(w, g, lr, v, before):  # intel/caffe in its warm-up; SGDwFASTLARS
  local = ETA * norm(w) / (norm(g) + WD * norm(w))
  v = M * lr / before * v + lr * local * (g + WD * w)
  return w - v, v


def tf_contrib(w, g, lr, v, before):  # with the decay in the gradient
  scaled_lr = lr * ETA * norm(w) / (norm(g) + WD * norm(w))
  v = M * v + (g + WD * w)
  return w - scaled_lr * v, v


def tf_contrib_l2_in_loss(w, g, lr, v, before):  # ApplyMomentum(var, scaled_lr, grad)
  scaled_lr = lr * ETA * norm(w) / (norm(g) + WD * norm(w))
  v = M * v + g
  return w - scaled_lr * v, v


def torch(w, g, lr, v, before):  # lightning-bolts; apex LARC(clip=False) before SGD
  d_p = (g + WD * w) * (ETA * norm(w) / (norm(g) + WD * norm(w)))
  v = M * v + d_p
  return w - lr * v, v


def optax(w, g, lr, v, before):  # add_decayed_weights, scale_by_trust_ratio, trace
  u = g + WD * w
  u = u * (ETA * norm(w) / norm(u))
  v = M * v - lr * u
  return w + v, v


def larc_clip(w, g, lr, v, before):  # apex LARC(clip=True) before torch.optim.SGD
  adaptive_lr = min(ETA * norm(w) / (norm(g) + norm(w) * WD) / lr, 1.0)
  v = M * v + (g + WD * w) * adaptive_lr
  return w - lr * v, v


def nvcaffe_clip(w, g, lr, v, before):  # larc_policy "clip": min(rate, local)
  rate = min(lr, (1 - M) * ETA * norm(w) / norm(g))
  v = M * v + rate * (g + WD * w)
  return w - v, v


def nvcaffe_scale(w, g, lr, v, before):  # larc_policy "scale": rate * local
  rate = lr * (1 - M) * ETA * norm(w) / norm(g)
  v = M * v + rate * (g + WD * w)
  return w - v, v


def timm(w, g, lr, v, before):  # optim/lars.py, trust_clip=False
  trust_ratio = ETA * norm(w) / (norm(g) + norm(w) * WD + TIMM_EPS)
  v = M * v + (g + WD * w) * trust_ratio
  return w - lr * v, v


def timm_clip(w, g, lr, v, before):  # trust_clip=True
  trust_ratio = ETA * norm(w) / (norm(g) + norm(w) * WD + TIMM_EPS)
  v = M * v + (g + WD * w) * min(trust_ratio / lr, 1.0)
  return w - lr * v, v


OF_GOOGLE_AND_INTEL = paper, corrected, tf_contrib, tf_contrib_l2_in_loss
OF_OTHERS = torch, optax, larc_clip, nvcaffe_clip, nvcaffe_scale, timm, timm_clip

if __name__ == "__main__":
  for step in OF_GOOGLE_AND_INTEL + OF_OTHERS:
    w, v, before = W0, np.zeros(3), RATES[0]
    for g, lr in zip(GRADS, RATES, strict=True):
      (w, v), before = step(w, g, lr, v, before), lr
      print(f"{step.__name__:22} {[round(x, 12) for x in w.tolist()]}")
