"""Published peak FLOP/s of accelerators."""

from __future__ import annotations

# Words of `jax.Device.device_kind`, and dense bfloat16 TFLOP/s of a JAX device, more specific
# names first. Sources: NVIDIA's data sheets (half of the values "with sparsity"; float16 for
# chips without bfloat16), AMD's data sheets, and Google Cloud's pages "TPU v2" to "TPU7x". A
# device is a core up to TPU v3, and half of the chip on TPU7x and MI250X.
_BF16_TFLOPS = """
GB300 = 2500; B300 = 2250; GB200 = 2500; B200 = 2250; H200 NVL = 835.5; H200 = 989.4;
GH200 = 989.4; H100 NVL = 835.5; H100 PCIe = 756; H100 = 989.4; H800 = 989.4; A100 = 312;
A800 = 312; A30 = 165; A10 = 125; A40 = 149.7; L40S = 362; L40 = 181; L4 = 121; V100 = 125;
T4 = 65; RTX 4090 = 165.2; RTX 3090 = 71; MI355X = 2500; MI325X = 1307.4; MI300X = 1307.4;
MI300A = 980.6; MI250X = 191.5; MI210 = 181; TPU7x = 1153.5; TPU v6 = 918; TPU v5p = 459;
TPU v5 lite = 197; TPU v5e = 197; TPU v5 = 459; TPU v4 = 275; TPU v3 = 61.5; TPU v2 = 22.5
"""


def peak_flops(device_kind: str) -> float | None:
  """Return a device's dense bfloat16 FLOP/s in its matrix units; None if it is unknown.

  Args:
    device_kind: the kind, as in `jax.Device.device_kind`.

  Example:
    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
    (989400000000000.0, None)
  """
  words = f" {device_kind.replace('-', ' ').replace('_', ' ')} "
  for row in _BF16_TFLOPS.split(";"):
    name, _, tflops = row.strip().partition(" = ")
    if f" {name} " in words or (name.startswith("TPU") and f" {name}" in words):
      return float(tflops) * 1e12
  return None
