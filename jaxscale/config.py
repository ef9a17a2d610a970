"""Every knob of a run: a tree of frozen dataclasses that hold no bad value.

Only primary quantities are settings. What follows from them (steps from
epochs, the peak rate from the batch size) is computed in `build.derive`,
printed, and written beside the run. An alternative is a class of its own, so a
setting that the chosen optimizer does not have cannot be set.
"""

from __future__ import annotations

from typing import Annotated, Literal

from jaxscale.settings import ConfigError, settings

# A number and the bound that `settings` holds it to.
Positive = Annotated[float, "> 0"]
NonNegative = Annotated[float, ">= 0"]
Fraction = Annotated[float, "in [0, 1)"]
Count = Annotated[int, ">= 1"]


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
    batch_norm: "none", "device" (statistics of a device's micro-batch) or
      "global" (of the micro-batches of all devices together).
    dropout: probability of dropping a unit before the classifier; the masks
      do not depend on the number of devices.
  """

  features: Annotated[tuple[int, ...], ">= 1"] = (32, 64)
  convs_per_stage: Count = 1
  dense: Annotated[int, ">= 0"] = 128
  batch_norm: Literal["none", "device", "global"] = "none"
  dropout: Fraction = 0.0


@settings
class ResNet:
  """A residual network, v1.5: the stride is in the 3x3 convolution.

  Attributes:
    depth: number of weighted layers.
    width: channels of the first stage.
    stem: "imagenet" (7x7 stride 2, max-pool) or "small" (3x3 stride 1).
    batch_norm: statistics over a "device" micro-batch or the "global" one.
    bn_momentum: decay of the running statistics.
    bn_epsilon: added to the variance.
    zero_init_residual: start the last BatchNorm scale of each block at 0.
  """

  depth: Literal[18, 34, 50, 101, 152] = 50
  width: Count = 64
  stem: Literal["imagenet", "small"] = "imagenet"
  batch_norm: Literal["device", "global"] = "device"
  bn_momentum: Annotated[float, "in (0, 1)"] = 0.9
  bn_epsilon: Positive = 1e-5
  zero_init_residual: bool = True


@settings
class Digits:
  """UCI handwritten digits, 8x8, embedded in the package (1,437 + 360).

  Attributes:
    augment: "none", or "shift" by up to one pixel.
  """

  augment: Literal["none", "shift"] = "shift"


@settings
class TFDS:
  """Any image-classification dataset of TensorFlow Datasets, by its name.

  Attributes:
    name: the dataset, as in `tfds.builder(name)`, e.g. "fashion_mnist".
    train_split: examples trained on, in TFDS's split notation.
    eval_split: examples evaluated on.
    data_dir: where it is prepared; None: $TFDS_DATA_DIR or TFDS's own default.
    image_size: height and width to crop and resize to; None: as stored, which
      needs images of one size.
    augment: "none", "flip", "shift_flip" (by up to image/14 pixels) or "crop"
      (random resized crop and flip; needs image_size).
    cache: decode everything once and keep it in memory.
  """

  name: str
  train_split: str = "train"
  eval_split: str = "test"
  data_dir: str | None = None
  image_size: Annotated[int | None, ">= 1"] = None
  augment: Literal["none", "flip", "shift_flip", "crop"] = "none"
  cache: bool = False

  def __post_init__(self):
    if self.augment == "crop" and self.image_size is None:
      raise ConfigError("TFDS.augment='crop': set image_size too, e.g. 224")
    if self.augment == "crop" and self.cache:
      raise ConfigError(
        "TFDS.cache=True: crops are cut from whole images, set it to False"
      )


@settings
class Synthetic:
  """Learnable images made on the fly: a pattern a class, plus noise.

  Attributes:
    num_examples: training examples; evaluation has a tenth of them.
    image_size: height and width.
    channels: colour channels.
    num_classes: number of classes.
  """

  num_examples: Count = 4096
  image_size: Count = 32
  channels: Count = 3
  num_classes: Count = 10


@settings
class SGD:
  """Stochastic gradient descent with momentum; L2 decay in the gradient.

  Attributes:
    lr: peak learning rate at the reference batch size.
    momentum: decay of the velocity.
    nesterov: look ahead.
    weight_decay: L2 coefficient, on kernels only.
  """

  lr: Positive
  momentum: Fraction = 0.9
  nesterov: bool = True
  weight_decay: NonNegative = 0.0


@settings
class LARS:
  """Layer-wise adaptive rate scaling (arXiv:1708.03888), MLPerf's form.

  Attributes:
    lr: peak learning rate at the reference batch size.
    momentum: decay of the velocity.
    weight_decay: L2 coefficient, on kernels only.
    trust_coefficient: eta of the paper.
    eps: added to the denominator of the trust ratio.
    nesterov: look ahead.
  """

  lr: Positive
  momentum: Fraction = 0.9
  weight_decay: NonNegative = 1e-4
  trust_coefficient: Positive = 1e-3
  eps: NonNegative = 0.0
  nesterov: bool = False


@settings
class AdamW:
  """Adam with decoupled weight decay (arXiv:1711.05101).

  Attributes:
    lr: peak learning rate at the reference batch size.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the square root of the second moment.
    weight_decay: decoupled decay, on kernels only.
  """

  lr: Positive
  b1: Fraction = 0.9
  b2: Fraction = 0.999
  eps: Positive = 1e-8
  weight_decay: NonNegative = 1e-4


@settings
class LAMB(AdamW):
  """Layer-wise Adam for large batches (arXiv:1904.00962): AdamW's fields."""

  eps: float = 1e-6
  weight_decay: float = 1e-2


@settings
class Cosine:
  """Linear warm-up, then half a cosine.

  Attributes:
    warmup_epochs: epochs from rate 0 to the peak.
    end_lr: rate at the end.
  """

  warmup_epochs: NonNegative = 0.0
  end_lr: NonNegative = 0.0


@settings
class Polynomial(Cosine):
  """Linear warm-up, then (1 - t)**power; power 2 to 1e-4 is MLPerf's.

  Attributes:
    power: exponent of the decay.
  """

  end_lr: float = 1e-4
  power: Positive = 2.0


@settings
class Steps:
  """Linear warm-up, then a constant rate cut at given epochs.

  Attributes:
    warmup_epochs: epochs from rate 0 to the peak.
    boundaries: epochs at which the rate is multiplied by `factor`.
    factor: the cut; 0.1 at 30, 60 and 80 is the recipe of arXiv:1706.02677.
  """

  warmup_epochs: NonNegative = 0.0
  boundaries: Annotated[tuple[float, ...], "> 0"] = (30.0, 60.0, 80.0)
  factor: Annotated[float, "in (0, 1]"] = 0.1

  def __post_init__(self):
    if list(self.boundaries) != sorted(set(self.boundaries)):
      raise ConfigError(
        f"Steps.boundaries={self.boundaries}: give them in rising order"
      )


@settings
class Mesh:
  """The devices as a grid of data parallelism, slowest links first.

  Attributes:
    replica: groups of devices joined by the slow links (nodes, slices).
    data: devices in a group; -1: all there are.
  """

  replica: int = 1
  data: int = -1

  def __post_init__(self):
    for name in ("replica", "data"):
      if (size := getattr(self, name)) < 1 and size != -1:
        raise ConfigError(f"Mesh.{name}={size}: give a number >= 1, or -1 for the rest")
    if self.replica == self.data == -1:
      raise ConfigError("Mesh.replica=-1 and Mesh.data=-1: only one can be the rest")


@settings
class Evaluation:
  """When and how the held-out examples are evaluated, always every one.

  Attributes:
    every_epochs: epochs between evaluations; the last step always has one.
    batch_size: examples a step, rounded up to a multiple of the devices.
  """

  every_epochs: Positive = 1.0
  batch_size: Count = 1000


@settings
class Checkpoint:
  """When checkpoints are written and which are kept.

  Attributes:
    every_epochs: epochs between checkpoints; the last step always has one.
    keep_last: how many of the newest to keep.
    keep_best: how many with the highest accuracy to keep as well.
  """

  every_epochs: Positive = 1.0
  keep_last: Count = 2
  keep_best: Annotated[int, ">= 0"] = 1


@settings
class Log:
  """What is written down on the way.

  Attributes:
    every_steps: steps between lines of metrics.
    tensorboard: also write TensorBoard event files.
  """

  every_steps: Count = 50
  tensorboard: bool = True


@settings
class Config:
  """One experiment.

  Attributes:
    model: MLP, CNN or ResNet.
    data: Digits, TFDS or Synthetic.
    optimizer: SGD, LARS, LAMB or AdamW.
    schedule: Cosine, Polynomial or Steps.
    batch_size: examples an optimizer step, over all devices.
    epochs: passes over the training examples.
    accumulate_steps: micro-batches a step; gradients are exchanged once.
    lr_scaling: how optimizer.lr grows with the batch: "none", "linear"
      (arXiv:1706.02677) or "sqrt".
    lr_reference_batch_size: the batch size that optimizer.lr belongs to.
    label_smoothing: share of the target spread over all classes.
    clip_norm: largest global norm of the gradient; None: no clipping.
    ema_decay: decay of an average of parameters and BatchNorm statistics,
      which is then what is evaluated; None: no average.
    dtype: type of activations; parameters and the exchange stay float32.
    seed: of initial parameters, order, augmentation and dropout.
    target_accuracy: the run is called a success from this accuracy on.
    mesh: the grid of devices.
    evaluation: when and how to evaluate.
    checkpoint: when to save and what to keep.
    log: what to write down.
  """

  model: MLP | CNN | ResNet
  data: Digits | TFDS | Synthetic
  optimizer: SGD | LARS | LAMB | AdamW
  schedule: Cosine | Polynomial | Steps = Cosine()
  batch_size: Count
  epochs: Positive
  accumulate_steps: Count = 1
  lr_scaling: Literal["none", "linear", "sqrt"] = "none"
  lr_reference_batch_size: Count = 256
  label_smoothing: Fraction = 0.0
  clip_norm: Annotated[float | None, "> 0"] = None
  ema_decay: Annotated[float | None, "in (0, 1)"] = None
  dtype: Literal["float32", "bfloat16"] = "float32"
  seed: Annotated[int, ">= 0"] = 0
  target_accuracy: Annotated[float | None, "in (0, 1]"] = None
  mesh: Mesh = Mesh()
  evaluation: Evaluation = Evaluation()
  checkpoint: Checkpoint = Checkpoint()
  log: Log = Log()

  def __post_init__(self):
    if self.batch_size % self.accumulate_steps:
      raise ConfigError(
        f"Config.batch_size={self.batch_size}: not divisible by "
        f"accumulate_steps={self.accumulate_steps}, change one of them"
      )
    if self.schedule.warmup_epochs >= self.epochs:
      raise ConfigError(
        f"{type(self.schedule).__name__}.warmup_epochs="
        f"{self.schedule.warmup_epochs}: the run has only {self.epochs} epochs, "
        "make the warm-up shorter than it"
      )
