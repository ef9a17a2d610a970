"""What a person sees of a run: metrics.jsonl, TensorBoard, a progress line, pictures.

Process 0 alone writes. `metrics.jsonl` is the record; TensorBoard's event files,
MLPerf's log and the pictures are the same for other readers. Knows no `Config`.
"""

from jaxscale.metrics.mllog import (
  MLLog,
  RunLog,
  Submission,
  log_from_record,
  read_mllog,
)
from jaxscale.metrics.plot import plot_metrics, plot_scaling, plot_study
from jaxscale.metrics.progress import Progress
from jaxscale.metrics.reading import read_json, read_json_lines
from jaxscale.metrics.score import (
  headline,
  is_reached,
  mllog_value,
  perplexity_of,
  score,
)
from jaxscale.metrics.text import duration
from jaxscale.metrics.writers import MetricWriter, write_json

__all__ = [
  "MLLog", "MetricWriter", "Progress", "RunLog", "Submission", "duration",
  "headline", "is_reached", "log_from_record", "mllog_value", "perplexity_of",
  "plot_metrics", "plot_scaling", "plot_study", "read_json", "read_json_lines",
  "read_mllog", "score", "write_json",
]  # fmt: skip
