"""What a person sees of a run: metrics.jsonl, TensorBoard, a progress line, pictures.

Process 0 alone writes. `metrics.jsonl` is the record; TensorBoard's event files,
trackers and the pictures show the same to other readers. Only `settings.py` knows what
a `Config` chooses from.
Names load when they are first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
