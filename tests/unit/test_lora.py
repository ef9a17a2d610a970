"""LoRA: the factors beside a model's kernels, and what a model computes with them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale import models, optim
from jaxscale.errors import ConfigError
from jaxscale.models import decoder, lora
from jaxscale.models.stack import stack_logits
from jaxscale.optim.tree_paths import path_name
from jaxscale.parallel.rules import Rule, partition
from support.tuned import ADAPTER, adapted, tiny_transformer

KEY = jax.random.key(3)
TOKENS = np.arange(20, dtype=np.int32).reshape(2, 10) % 7


def by_path(tree):
  return {path_name(path): x for path, x in jax.tree.leaves_with_path(tree)}


def w64(params, scale):
  """Return float64 kernels W + scale A B by path, by numpy."""
  flat = {path: np.asarray(x, np.float64) for path, x in by_path(params).items()}
  for path in [p for p in flat if p.endswith("_lora_a")]:
    name = path.removesuffix("_lora_a")
    flat[name] = flat[name] + scale * (flat.pop(path) @ flat.pop(f"{name}_lora_b"))
  return flat


def test_the_layers_of_a_transformer_are_adapted_and_start_as_they_were():
  plain, stack = tiny_transformer(), lora.adapt(tiny_transformer(), ADAPTER)
  before, params = plain.init(KEY), stack.init(KEY)
  found = by_path(params)
  factors = {path for path in found if "_lora_" in path}
  names = "q k v o gate up down".split()
  assert factors == {f"layers/{n}/kernel_lora_{x}" for n in names for x in "ab"}
  for path, x in by_path(before).items():
    np.testing.assert_array_equal(found[path], x)
  np.testing.assert_array_equal(
    stack_logits(stack, params, {"tokens": TOKENS}),
    (stack_logits(plain, before, {"tokens": TOKENS})),
  )


def test_a_is_uniform_within_the_bound_of_peft_and_b_is_zero():
  params = lora.adapt(tiny_transformer(), lora.Lora(64, 1.0)).init(KEY)["layers"]
  for name, width in (("q", 32), ("down", 64)):
    a = np.asarray(params[name]["kernel_lora_a"])
    assert a.shape == (4, width, 64) and np.abs(a).max() <= width**-0.5
    assert a.std() == pytest.approx(width**-0.5 / 3**0.5, rel=0.02)  # of a uniform distribution
    assert not np.any(params[name]["kernel_lora_b"])
  q, k = (np.asarray(params[n]["kernel_lora_a"]) for n in "qk")
  assert not np.any(q == k) and not np.any(q[0] == q[1])


def test_factors_are_applied_as_merged_kernels():
  stack = adapted(tiny_transformer())
  params = stack.init(KEY)
  merged = lora.merged(params, ADAPTER.scale)
  expected = stack_logits(tiny_transformer(), merged, {"tokens": TOKENS})
  found = stack_logits(stack, params, {"tokens": TOKENS})
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
  moved = stack_logits(tiny_transformer(), lora.without_adapters(params), {"tokens": TOKENS})
  assert np.abs(moved - expected).max() > 0.01
  for path, x in by_path(merged).items():
    np.testing.assert_allclose(x, w64(params, ADAPTER.scale)[path], rtol=1e-5, atol=1e-7)


def test_the_head_of_a_transformer_can_be_adapted():
  own = lora.Lora(2, 3.0, "head/kernel")
  stack = adapted(tiny_transformer(), own)
  params = stack.init(KEY)
  assert {p for p in by_path(params) if "lora" in p} == {f"head/kernel_lora_{x}" for x in "ab"}
  expected = stack_logits(tiny_transformer(), lora.merged(params, 3.0), {"tokens": TOKENS})
  np.testing.assert_allclose(stack_logits(stack, params, {"tokens": TOKENS}), expected, rtol=1e-6)


class Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Conv(4, (3, 3))(x).reshape(len(x), -1)
    return nn.Dense(3)(nn.tanh(nn.Dense(8)(x)))


def net():
  return models.functions(Net(), (4, 4, 1), dtype="float32")


def test_a_linen_module_computes_with_merged_kernels():
  fns = net()
  own = lora.adapt(fns, lora.Lora(2, 0.5, "Dense_0/kernel"))
  params, state = own.init(KEY)
  params["Dense_0"]["kernel_lora_b"] = jax.random.normal(KEY, (2, 3))
  images = jax.random.normal(KEY, (5, 4, 4, 1))
  found, _ = own.apply(params, state, images, True, None)
  kernel = w64(params, 0.5)["Dense_0/kernel"]
  plain = lora.without_adapters(params)
  plain["Dense_0"]["kernel"] = jnp.asarray(kernel, jnp.float32)
  expected, _ = fns.apply(plain, state, images, True, None)
  np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
  ("targets", "problem"),
  [
    ("Conv_0/kernel", "which is not a kernel [in, out]; select only kernels of dense layers"),
    ("bias", "selects Conv_0/bias of shape [4], which is not a kernel"),
    ("Dense_7", "LoRA.targets=Dense_7 matches no parameter; paths are, e.g., Conv_0/kernel"),
    (None, "LoRA.targets=None selects the layers of Transformer and ViT only; give a regular"),
  ],
)
def test_targets_that_are_no_dense_kernels_are_refused(targets, problem):
  with pytest.raises(ConfigError) as e:
    lora.adapt(net(), lora.Lora(2, 1.0, targets)).init(KEY)
  assert problem in str(e.value)


def test_parameters_that_are_no_dict_are_refused():
  fns = models.ModelFns(lambda key: ([jnp.ones((3, 2))], {}), lambda params, *rest: rest)
  with pytest.raises(ConfigError, match="nested dicts, and these are a list; return a dict"):
    lora.adapt(fns, lora.Lora(2, 1.0, "0")).init(KEY)


def test_a_table_is_looked_up_and_is_no_kernel():
  with pytest.raises(ConfigError, match=r"selects embed/table of shape .* not a kernel"):
    lora.adapt(tiny_transformer(), lora.Lora(2, 1.0, "embed/table")).init(KEY)


def test_factors_are_split_as_their_kernels_and_decay_as_kernels():
  params = jax.eval_shape(adapted(tiny_transformer()).init, KEY)
  rules = [Rule(*r) for r in decoder.SHARDING]
  layers = partition(params, rules, {"fsdp": 2, "model": 2, "stage": 2})["layers"]
  split = {n: [tuple(layers[n][f"kernel{x}"]) for x in ("", "_lora_a", "_lora_b")] for n in "qo"}
  assert split == {
    "q": [("stage", "fsdp", "model"), ("stage", "fsdp", None), ("stage", None, "model")],
    "o": [("stage", "model", "fsdp"), ("stage", "model", None), ("stage", None, "fsdp")],
  }
  one_layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params["layers"])
  decays = by_path(optim.masks.kernels(one_layer))
  assert all(is_kernel == ("norm" not in path) for path, is_kernel in decays.items())


def test_scales_of_the_settings():
  assert cfg.LoRA(rank=4, alpha=8).scale == 2
  assert cfg.LoRA(rank=4, alpha=8, scale_by_sqrt=True).scale == 4
  with pytest.raises(ConfigError, match=r"LoRA.targets='\('"):
    cfg.LoRA(targets="(")
  with pytest.raises(ConfigError, match=r"LoRA.rank=0: give a value >= 1"):
    cfg.LoRA(rank=0)
