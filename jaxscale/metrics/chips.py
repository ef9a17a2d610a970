"""Peak rates of accelerators, as their makers publish them."""

from __future__ import annotations

# Words of `jax.Device.device_kind`, and dense bfloat16 TFLOP/s of what JAX calls a
# device, the more special ones first. Sources: NVIDIA's data sheets (half of what they
# give "with sparsity"; float16 for those without bfloat16), AMD's data sheets, Google
# Cloud's pages "TPU v2" to "TPU7x". A core is a device up to TPU v3, a half of the chip
# on TPU7x and MI250X.
_BF16_TFLOPS = {
  "GB300": 2_500.0,
  "B300": 2_250.0,
  "GB200": 2_500.0,
  "B200": 2_250.0,
  "H200 NVL": 835.5,
  "H200": 989.4,
  "GH200": 989.4,
  "H100 NVL": 835.5,
  "H100 PCIe": 756.0,
  "H100": 989.4,
  "H800": 989.4,
  "A100": 312.0,
  "A800": 312.0,
  "A30": 165.0,
  "A10": 125.0,
  "A40": 149.7,
  "L40S": 362.0,
  "L40": 181.0,
  "L4": 121.0,
  "V100": 125.0,
  "T4": 65.0,
  "RTX 4090": 165.2,
  "RTX 3090": 71.0,
  "MI355X": 2_500.0,
  "MI325X": 1_307.4,
  "MI300X": 1_307.4,
  "MI300A": 980.6,
  "MI250X": 191.5,
  "MI210": 181.0,
  "TPU7x": 1_153.5,
  "TPU v6": 918.0,
  "TPU v5p": 459.0,
  "TPU v5 lite": 197.0,
  "TPU v5e": 197.0,
  "TPU v5": 459.0,
  "TPU v4": 275.0,
  "TPU v3": 61.5,
  "TPU v2": 22.5,
}


def peak_flops(device_kind: str) -> float | None:
  """Dense bfloat16 FLOP/s of a device, in all its matrix units; None: not known.

  Args:
    device_kind: as `jax.Device.device_kind` has it.

  Example:
    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
    (989400000000000.0, None)
  """
  words = f" {device_kind.replace('-', ' ').replace('_', ' ')} "
  for name, tflops in _BF16_TFLOPS.items():
    if f" {name} " in words or (name.startswith("TPU") and f" {name}" in words):
      return tflops * 1e12
  return None
