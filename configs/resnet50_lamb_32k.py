"""ResNet-50 on ImageNet by LAMB at batch 32,768, as its authors released it.

Command    srun jaxscale train --config configs/resnet50_lamb_32k.py
Hardware   not run here: needs ImageNet and a cluster. Published: 128 TPU v3 chips
Result     published: 76.34 % top-1 in 90 epochs (log of the released code,
           fastalgo/imagenet_resnet50_lamb; paper arXiv:1904.00962)

As released (optimization.py, run.sh): weight decay 1.5, decoupled; BatchNorm
without decay and trust ratio, the classifier's bias with both; no bias correction;
gradients clipped to a global norm of 1; after 782 of 3,519 steps linearly towards
0, 0.04 (3519 - step) / (3519 - 782).
"""

from jaxscale.config import LAMB, TFDS, Config, CrossEntropy, Evaluation, Polynomial, ResNet

WARMUP_STEPS, STEPS = 782, 3519


def get_config() -> Config:
  return Config(
    model=ResNet(depth=50, bn_span=128),
    data=TFDS(name="imagenet2012", eval_split="validation", image_size=224, augment="crop"),
    optimizer=LAMB(
      lr=0.04,
      b1=0.9,
      b2=0.999,
      eps=1e-6,
      weight_decay=1.5,
      bias_correction=False,
      include=r"kernel$|^Dense_0/bias$",
    ),
    schedule=Polynomial(
      warmup_steps=WARMUP_STEPS, power=1.0, end_lr=0.0, decay_steps=STEPS - WARMUP_STEPS
    ),
    clip_norm=1.0,
    batch_size=32_768,
    steps=STEPS,
    loss=CrossEntropy(label_smoothing=0.1),
    dtype="bfloat16",
    evaluation=Evaluation(every_epochs=5, batch_size=2000),
    target_accuracy=0.763,
  )
