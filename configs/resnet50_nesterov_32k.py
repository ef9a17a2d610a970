"""ResNet-50 on ImageNet by Nesterov momentum at batch 32,768: Nado et al.

Command    srun jaxscale train --config configs/resnet50_nesterov_32k.py
Hardware   not run here: needs ImageNet and a cluster. Published: 256 TPU v3 cores
Result     published: 75.9 % top-1 in 2,512 steps, as many as LARS, about 310 s
           (README of Distributed Shampoo, google-research, on arXiv:2102.06356)

The baseline to LARS: no layer-wise rate, all numbers tuned for this batch. They are
recalled from the paper's tables of tuned values, not read there: peak rate 7.05,
1 - momentum 0.024, decay 5.8e-5, label smoothing 0.15, 638 steps of warm-up,
polynomial of power 2, no decay on BatchNorm and biases. The 2,512 steps are from
that README; the form of the schedule (`mlperf_polynomial`) and BatchNorm over 64
examples (`mlperf_resnet`) were read in google/init2winit, which holds no tuned
values. That the warm-up is linear and from 0 and the end rate 1e-4 is assumed, as
in Google's MLPerf v0.7 (resnet50_lars.py:google-32768). Adam was tuned on BERT
there: for ImageNet there is nothing to copy.
"""

from jaxscale.config import SGD, TFDS, Config, CrossEntropy, Evaluation, Polynomial, ResNet


def get_config() -> Config:
  return Config(
    model=ResNet(depth=50, bn_span=64),
    data=TFDS(name="imagenet2012", eval_split="validation", image_size=224, augment="crop"),
    optimizer=SGD(lr=7.05, momentum=1 - 0.024, nesterov=True, weight_decay=5.8e-5),
    schedule=Polynomial(warmup_steps=638, power=2.0, end_lr=1e-4),
    batch_size=32_768,
    steps=2512,
    loss=CrossEntropy(label_smoothing=0.15),
    dtype="bfloat16",
    evaluation=Evaluation(every_epochs=4, batch_size=2000),
    target_accuracy=0.759,
  )
