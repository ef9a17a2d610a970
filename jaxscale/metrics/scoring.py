"""Scores of evaluations: accuracy, or perplexity of a language model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from jaxscale.errors import ConfigError

Values = Mapping[str, float]  # metrics by name

# Metrics that jaxscale itself computes; all others are the user's.
_BUILT_IN = """accuracy bits_per_byte grad_norm gradient_noise gradient_signal learning_rate loss
  loss_scale noise_scale noise_scale_high noise_scale_low overflow_steps perplexity""".split()
_LOWER = "loss", "error", "perplexity", "bits_per_byte"  # ends of names; the lowest is best


def perplexity_of(loss: float, bytes_per_token: float | None) -> dict[str, float]:
  """Return the metrics of a language model that follow from its loss.

  Perplexity is exp of the mean cross entropy per token. Bits per byte are the loss divided by
  ln 2 and by the bytes per token, so they are comparable between tokenizers (arXiv:2101.00027,
  §3.1).

  Args:
    loss: the loss in nats per token.
    bytes_per_token: the average bytes per token of the text; None if it is not known.

  Example:
    >>> perplexity_of(math.log(2.0), 1.0)
    {'perplexity': 2.0, 'bits_per_byte': 1.0}
  """
  most = math.log(1.7e308)
  values = {"perplexity": math.exp(loss) if not loss > most else math.inf}
  if bytes_per_token is not None:
    values["bits_per_byte"] = loss / math.log(2) / bytes_per_token
  return values


def signed(best: str, lower: Iterable[str] = ()) -> str:
  """Return the name of a metric, with a minus sign if the lowest value is best.

  Args:
    best: `Checkpoint.best_metric`: a name with or without "val/", "eval/" and a sign.
    lower: the names of further metrics whose lowest value is best.

  Example:
    >>> signed("val/f1"), signed("mean_absolute_error"), signed("-distance")
    ('f1', '-mean_absolute_error', '-distance')
  """
  name = best.removeprefix("-").removeprefix("val/").removeprefix("eval/")
  is_lower = name.endswith(_LOWER) or name in lower or best.startswith("-")
  return "-" * is_lower + name


def score(values: Values, best: str | None = None) -> float | None:
  """Return the score that ranks evaluations, higher is better.

  Args:
    values: the metrics of an evaluation.
    best: the metric that decides, from `signed`; None is accuracy, or minus the loss.

  Returns:
    The score, or None if the metric was not measured or is NaN.

  Example:
    >>> score({"accuracy": 0.5, "loss": 2.0}), score({"loss": 2.0, "perplexity": 7.4})
    (0.5, -2.0)
    >>> score({"accuracy": 0.5, "f1": 0.4}, "f1")
    0.4
  """
  if best is None:
    best = "accuracy" if "accuracy" in values and "perplexity" not in values else "-loss"
  value = values.get(best.removeprefix("-"), math.nan)
  if math.isnan(value):
    return None
  return -value if best.startswith("-") else value


def best_of(
  evaluations: Iterable[tuple[Values, int]], best: str | None
) -> tuple[float | None, int | None]:
  """Return the highest score and its step, the earliest of equal ones, or (None, None).

  Args:
    evaluations: metrics and step of each evaluation.
    best: the metric that decides, as for `score`.

  Example:
    >>> best_of([({"f1": 0.4}, 10), ({"f1": 0.5}, 20), ({"f1": 0.5}, 30)], "f1")
    (0.5, 20)
  """
  known = ((x, step) for values, step in evaluations if (x := score(values, best)) is not None)
  return max(known, key=lambda pair: (pair[0], -pair[1]), default=(None, None))


def is_reached(values: Values, accuracy: float | None, loss: float | None) -> bool | None:
  """Return whether an evaluation reaches the target; None if there is no target."""
  if loss is not None:
    return values["loss"] <= loss
  if accuracy is not None and "accuracy" not in values:
    problem = "Config.loss reports no accuracy; use target_loss instead"
    raise ConfigError(f"Config.target_accuracy={accuracy}: {problem}")
  return None if accuracy is None else values["accuracy"] >= accuracy


def headline(values: Values) -> str:
  """Format the metrics of an evaluation as text.

  Example:
    >>> headline({"accuracy": 0.5, "loss": 2.0})
    'accuracy 50.00%  loss 2.0000'
  """
  text = f"loss {values['loss']:.4f}"
  if "accuracy" in values and "perplexity" not in values:
    text = f"accuracy {values['accuracy']:.2%}  {text}"
  elif "perplexity" in values:
    text += f"  perplexity {values['perplexity']:.3f}"
  if "bits_per_byte" in values:
    text += f"  {values['bits_per_byte']:.4f} bits/byte"
  return "  ".join([text, *user_metrics(values)])


def user_metrics(values: Values) -> list[str]:
  """Format the metrics that only the user's own loss or evaluation reports.

  Example:
    >>> user_metrics({"loss": 2.0, "recall": 0.5, "grad_norm": 3.0})
    ['recall 0.5']
  """
  names = [n for n in values if n not in _BUILT_IN and not n.startswith("trust_ratio/")]
  return [f"{name} {values[name]:.4g}" for name in names]
