"""Settings of the models."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxscale.config.bounds import Count, Fraction, Positive
from jaxscale.settings import ConfigError, settings

# Examples that share BatchNorm statistics: a number, whatever the number of
# devices; "device": those of a device's micro-batch; "global": of all devices'.
Span = int | Literal["device", "global"]


def _check_span(owner: str, span: int | str) -> None:
  if isinstance(span, int) and span < 2:
    raise ConfigError(
      f"{owner}.bn_span={span}: statistics need 2 examples or more; give a "
      "number >= 2, 'device' or 'global'"
    )


@settings
class MLP:
  """A multi-layer perceptron with ReLU.

  Attributes:
    hidden: width of each hidden layer.
  """

  hidden: Annotated[tuple[int, ...], ">= 1"] = (256, 256)


@settings
class CNN:
  """A small convolutional network: 3x3 convolutions, one max-pool a stage.

  Attributes:
    features: channels of each stage; each stage halves height and width.
    convs_per_stage: convolutions in a stage.
    dense: width of the hidden layer before the classifier; 0: none.
    batch_norm: normalise after every convolution.
    bn_span: examples that share BatchNorm statistics: a number, "device" (a
      device's micro-batch) or "global" (the micro-batches of all devices).
    dropout: probability of dropping a unit before the classifier; the masks
      do not depend on the number of devices.
  """

  features: Annotated[tuple[int, ...], ">= 1"] = (32, 64)
  convs_per_stage: Count = 1
  dense: Annotated[int, ">= 0"] = 128
  batch_norm: bool = False
  bn_span: Span = "device"
  dropout: Fraction = 0.0

  def __post_init__(self):
    _check_span("CNN", self.bn_span)


@settings
class AlexNet:
  """AlexNet (NeurIPS 2012), or with BatchNorm in place of its local one.

  Attributes:
    batch_norm: AlexNet-BN, the network of the batch-32K recipes.
    bn_span: examples that share BatchNorm statistics; see CNN.
    dropout: probability of dropping a unit of the two hidden dense layers.
  """

  batch_norm: bool = False
  bn_span: Span = "device"
  dropout: Fraction = 0.5

  def __post_init__(self):
    _check_span("AlexNet", self.bn_span)


@settings
class ResNet:
  """A residual network, v1.5: the stride is in the 3x3 convolution.

  Attributes:
    depth: number of weighted layers.
    width: channels of the first stage.
    stem: "imagenet" (7x7 stride 2, max-pool) or "small" (3x3 stride 1).
    bn_span: examples that share BatchNorm statistics; see CNN.
    bn_momentum: decay of the running statistics.
    bn_epsilon: added to the variance.
    zero_init_residual: start the last BatchNorm scale of each block at 0.
  """

  depth: Literal[18, 34, 50, 101, 152] = 50
  width: Count = 64
  stem: Literal["imagenet", "small"] = "imagenet"
  bn_span: Span = "device"
  bn_momentum: Annotated[float, "in (0, 1)"] = 0.9
  bn_epsilon: Positive = 1e-5
  zero_init_residual: bool = True

  def __post_init__(self):
    _check_span("ResNet", self.bn_span)
