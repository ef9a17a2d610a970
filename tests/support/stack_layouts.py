"""Layouts of the small stack on simulated devices."""

import jax

from jaxscale.mesh import make_mesh
from jaxscale.parallel import make_layout
from support.tiny_stack import RULES, tiny_stack


def stack_layout(sizes, options=(), *, count=8, rules=RULES, **of_stack):
  """Return the mesh of the first `count` devices, the stack, and its layout there.

  Args:
    sizes: the sizes of the mesh axes.
    options: the options of the layout.
    count: the number of devices.
    rules: the rules that split the parameters.
    of_stack: arguments of `tiny_stack`.
  """
  mesh = make_mesh(devices=jax.devices()[:count], **sizes)
  stack = tiny_stack(**of_stack)
  shapes = jax.eval_shape(stack.init, jax.random.key(0))
  return mesh, stack, make_layout(mesh, shapes, rules, **dict(options))
