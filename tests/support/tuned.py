"""Training of a part of a small transformer: frozen parameters and LoRA, under any layout."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxscale import optim
from jaxscale.exchange import plain
from jaxscale.mesh import batch_sharding, make_mesh
from jaxscale.models import decoder, lora, make_transformer
from jaxscale.parallel import gpipe_grads, make_layout, one_f_one_b_grads, stack_loss
from jaxscale.parallel.layout_exchange import exchange_axes
from jaxscale.parallel.rules import Rule
from jaxscale.parallel.trainable import trainable_layout
from jaxscale.training import init_state
from jaxscale.training.step import make_train_step
from jaxscale.training.types import StepOptions
from support.parity_table import Case, batches
from support.tiny_stack import VOCAB

STEPS, SEED = 4, 3
IS_STACKED = optim.matching("^layers/")
TX = optim.sgd(0.1, momentum=0.9, nesterov=False, weight_decay=1e-2, stacked=IS_STACKED)
RULES = [Rule(*r) for r in decoder.SHARDING]
HEAD, SOME, ALL_ADAPTED = "^head/", "layers/(q|down)/|embed|attn_norm", "LoRA"
ADAPTER = lora.Lora(rank=2, scale=4.0)
PARTS = (HEAD, SOME, ALL_ADAPTED)


class Tuned(NamedTuple):
  """Results of a training: losses before each step, and states as numpy arrays."""

  losses: list[float]
  first: Any
  last: Any


def tiny_transformer(dtype="float32"):
  sizes = dict(num_layers=4, width=32, num_heads=4, hidden=64, pad_vocab_to=8)
  return make_transformer(vocab_size=VOCAB, dtype=dtype, **sizes)


def adapted(stack, adapter=ADAPTER):
  """Return the stack with adapters whose B is not 0, so that both factors have gradients."""
  stack = lora.adapt(stack, adapter)

  def init(key):
    def moved(path, x):
      is_b = jax.tree_util.keystr(path).endswith("_lora_b']")
      return x + 0.02 * jax.random.normal(jax.random.key(5), x.shape) if is_b else x

    return jax.tree.map_with_path(moved, stack.init(key))

  return stack._replace(init=init)


def tune(case: Case, part: str, stack: Any = None, **more: Any) -> Tuned:
  """Train the parameters of a part, `HEAD`, `SOME` or `ALL_ADAPTED`."""
  pattern, stack = part, stack or tiny_transformer()
  if part == ALL_ADAPTED:
    pattern, stack = lora.LEAVES, adapted(stack)
  mesh = make_mesh(devices=jax.devices()[: int(np.prod([*case.mesh.values()]))], **case.mesh)
  shapes = jax.eval_shape(stack.init, jax.random.key(0))
  layout = make_layout(mesh, shapes, RULES, **dict(case.options))
  schedules = {"gpipe": gpipe_grads, "1f1b": one_f_one_b_grads}
  piped = schedules[case.schedule] if "stage" in mesh.axis_names else stack_loss
  exchange = case.exchange(exchange_axes(trainable_layout(layout, pattern)))
  parts = TX, mesh, exchange
  state = init_state(
    lambda key: (stack.init(key), {}), *parts, layout=layout, trainable=pattern, seed=SEED
  )
  options = StepOptions(case.micros, seed=SEED, trainable=pattern, **more)
  step = make_train_step(piped(stack, layout), *parts, layout=layout, options=options)
  first, losses = jax.device_get(state), []
  for batch in batches()[:STEPS]:
    state, metrics = step(state, jax.device_put(batch, batch_sharding(mesh)))
    losses.append(float(metrics["loss"]))
  return Tuned(losses, first, jax.device_get(state))


@functools.cache
def on_one_device(part: str) -> Tuned:
  return tune(Case({"data": 1}, exchange=plain), part)
