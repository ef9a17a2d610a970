"""Metrics of a run: metrics.jsonl, TensorBoard, progress lines and pictures.

Only process 0 writes. `metrics.jsonl` is the record; TensorBoard's event files, trackers and
pictures show the same metrics. Only `settings.py` knows the settings of a `Config`.
Names are imported on first use.
"""

from jaxscale import lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
