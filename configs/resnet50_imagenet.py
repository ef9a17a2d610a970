"""ResNet-50 on ImageNet by SGD: the recipe of Goyal et al., batch 8,192.

Command    srun jaxscale train --config configs/resnet50_imagenet.py
Hardware   256 P100 in the paper (arXiv:1706.02677): 1 hour, 76.26 % top-1
Result     not run here yet: needs ImageNet, prepared by
           jaxscale prepare imagenet2012 --manual-dir DIR
           (DIR holds the archives; image-net.org gives them on registration)

    configs/resnet50_imagenet.py:256 scales the batch, and the rate with it.

BatchNorm statistics are over 32 examples, a worker's in the paper, on any number
of devices. Momentum needs no correction: the rate is outside the velocity.
"""

from jaxscale.config import SGD, TFDS, Config, Evaluation, ResNet, Steps


def get_config(batch_size: str = "8192") -> Config:
  return Config(
    model=ResNet(depth=50, bn_span=32),
    data=TFDS(name="imagenet2012", eval_split="validation", image_size=224, augment="crop"),
    optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=1e-4),
    lr_scaling="linear",
    lr_reference_batch_size=256,
    schedule=Steps(warmup_epochs=5, warmup_lr=0.1, boundaries=(30, 60, 80), factor=0.1),
    batch_size=int(batch_size),
    epochs=90,
    dtype="bfloat16",
    evaluation=Evaluation(every_epochs=5, batch_size=2000),
    target_accuracy=0.759,
  )
