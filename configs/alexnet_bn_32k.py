"""AlexNet-BN on ImageNet by LARS at batch 32,768: ImageNet in minutes.

Command    srun python -m jaxscale.train --config configs/alexnet_bn_32k.py
Hardware   not run here: needs ImageNet and a cluster. Published: 512 KNL in 24
           minutes, 1,024 Skylake in 11 (arXiv:1709.05011)
Result     published: 58.5 % and 58.6 % top-1 after 100 epochs (as recalled from
           the paper's table, not read in it)

The solver is that of Intel Caffe (models/intel_optimized_models/multinode/
alexnet_bn_64nodes/solver.prototxt, 64 nodes of 512 examples): rate 1 to 32 in
400 steps, then 32 (1 - step / 4000)^2 of the absolute step, so it drops to 25.92
there; momentum corrected during the warm-up only; LARS and decay for every
parameter, biases and BatchNorm included. The input differs: the prototxt crops 227
pixels at random out of images stored at 256x256, mirrors them and subtracts a mean
image; here it is the Inception-style crop, mirrored, with a mean for each channel.
"""

from jaxscale.config import LARS, TFDS, AlexNet, Config, Evaluation, Polynomial


def get_config() -> Config:
  return Config(
    model=AlexNet(batch_norm=True, bn_span=512, dropout=0.5),
    data=TFDS(name="imagenet2012", eval_split="validation", image_size=227, augment="crop"),
    optimizer=LARS(
      lr=32.0,
      momentum=0.9,
      weight_decay=5e-4,
      trust_coefficient=1e-3,
      momentum_correction="warmup",
      include="all",
    ),
    schedule=Polynomial(warmup_steps=400, warmup_lr=1.0, power=2.0, end_lr=0.0, restart=False),
    batch_size=32_768,
    steps=4000,
    dtype="bfloat16",
    evaluation=Evaluation(every_epochs=5, batch_size=2000),
    target_accuracy=0.585,
  )
