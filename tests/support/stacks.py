"""A model of stacked layers on one device, against which layouts are tested."""

from jaxscale.models.stack import Ops, hidden_states


def run_stack(stack, params, batch, *, remat="none"):
  """Return the totals of a batch, from `stack.finish`."""
  h = hidden_states(stack, params, batch, remat=remat)
  return stack.finish(stack.head_of(params.get), h, batch, Ops())
