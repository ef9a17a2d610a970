"""What a person sees of a run: files, a progress line, a plot.

The leader process alone writes. `metrics.jsonl` is the record; TensorBoard's
event files and the plot say the same to other readers.
"""

from jaxscale.metrics.mllog import MLLog, read_mllog
from jaxscale.metrics.mllog_run import RunLog, Submission, log_from_record
from jaxscale.metrics.plot import plot_metrics
from jaxscale.metrics.progress import Progress
from jaxscale.metrics.reading import read_json, read_json_lines
from jaxscale.metrics.scaling_plot import plot_scaling
from jaxscale.metrics.score import (
  headline,
  is_reached,
  mllog_value,
  perplexity_of,
  score,
)
from jaxscale.metrics.study_plot import plot_study
from jaxscale.metrics.text import duration
from jaxscale.metrics.writers import MetricWriter, write_json

__all__ = [
  "MLLog", "MetricWriter", "Progress", "RunLog", "Submission", "duration",
  "headline", "is_reached", "log_from_record", "mllog_value", "perplexity_of",
  "plot_metrics", "plot_scaling", "plot_study", "read_json", "read_json_lines",
  "read_mllog", "score", "write_json",
]  # fmt: skip
