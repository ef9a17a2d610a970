"""ResNet-101 on ImageNet-22k: a head of 21,841 classes, IBM DDL's run.

Command    srun jaxscale train --config configs/resnet101_imagenet22k.py
           with --config.data.path=DIR: DIR/train and DIR/val hold one directory
           per class
Hardware   not run here: needs the data and a cluster. Published: 256 P100 in 64
           nodes, about 7 hours (arXiv:1708.02188 and IBM's announcement)
Result     published: 33.8 % top-1 on 7.5 million images, before it 29.8 %
           (Microsoft, 10 days on 120 nodes). Neither batch size nor schedule of
           that run was found; 20 images per GPU, 5,120 in all, is from memory, and
           rate, decay and epochs here are those of Goyal et al. BatchNorm is over
           20 images on any number of devices, as it was on each of those GPUs
"""

from jaxscale.config import SGD, Config, Evaluation, ImageFolder, ResNet, Steps


def get_config(batch_size: str = "5120") -> Config:
  return Config(
    model=ResNet(depth=101, bn_span=20),
    data=ImageFolder(path="imagenet22k", image_size=224, augment="crop"),
    optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=1e-4),
    lr_scaling="linear",
    lr_reference_batch_size=256,
    schedule=Steps(warmup_epochs=5, warmup_lr=0.1, boundaries=(30, 60, 80)),
    batch_size=int(batch_size),
    epochs=90,
    dtype="bfloat16",
    evaluation=Evaluation(every_epochs=5, batch_size=2000),
    target_accuracy=0.338,
  )
