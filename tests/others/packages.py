"""Packages of others, or None where one is not installed; imported in this order.

Nothing is downloaded: weights are random.
"""

import contextlib
import importlib
import os
import sys
import types
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"


def _load(name):
  # Their own warnings, at import, are not ours to fix.
  with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    return importlib.import_module(name)
  return None


torch = _load("torch")
if torch is not None:
  if torch.version.cuda is None:
    # torchvision's wheels may be for CUDA: to register its compiled operators fails
    # with a PyTorch without it, and none of them is needed here.
    unused = types.ModuleType("torchvision._meta_registrations")
    sys.modules.setdefault("torchvision._meta_registrations", unused)
  torch.set_num_threads(1)  # the same sums on every machine, as near as can be
torchvision = _load("torchvision")
timm = _load("timm")
transformers = _load("transformers")
tokenizers = _load("tokenizers")
mlperf_logging = _load("mlperf_logging")
xprof = _load("xprof")
