"""What a person sees of a run: files, a progress line, a plot.

The leader process alone writes. `metrics.jsonl` is the record; TensorBoard's
event files and the plot say the same to other readers.
"""

from jaxscale.metrics.plot import plot_metrics
from jaxscale.metrics.progress import Progress, duration
from jaxscale.metrics.writers import MetricWriter, read_metrics, write_json

__all__ = [
  "MetricWriter", "Progress", "duration", "plot_metrics", "read_metrics",
  "write_json",
]  # fmt: skip
