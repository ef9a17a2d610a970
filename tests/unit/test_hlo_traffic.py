"""Bytes of fusions that update a part of an array, as the loops over layers do."""

from jaxscale.hlo import cost, parse

UPDATED = """HloModule m, is_scheduled=true
%fused (p: bf16[12,1000], i: s32[], x: bf16[1000]) -> bf16[12,1000] {
  %p = bf16[12,1000]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[1000]{0} parameter(2)
  %b = bf16[1,1000]{1,0} bitcast(%x)
  %zero = s32[] constant(0)
  ROOT %u = bf16[12,1000]{1,0} dynamic-update-slice(%p, %b, %i, %zero)
}
ENTRY %m (p: bf16[12,1000], i: s32[], x: bf16[1000]) -> bf16[12,1000] {
  %p = bf16[12,1000]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[1000]{0} parameter(2)
  BODY
}"""
PLAIN = "ROOT %f = bf16[12,1000]{1,0} fusion(%p, %i, %x), kind=kLoop, calls=%fused"
STARTED = """%f = ((bf16[12,1000]{1,0}, s32[], bf16[1000]{0}), bf16[12,1000]{1,0}, u32[]) \
fusion-start(%p, %i, %x), kind=kLoop, calls=%fused
  ROOT %d = bf16[12,1000]{1,0} fusion-done(%f)"""


def fusion(body):
  (module,) = parse.modules(UPDATED.replace("BODY", body))
  entry = module.computations["m"]
  return module, entry, entry["f"]


def test_an_update_is_read_and_written_once():
  module, entry, instruction = fusion(PLAIN)
  assert cost.traffic(module, entry, instruction) == 2 * 2000 + 4  # the slice twice, the index


def test_a_fusion_on_a_stream_of_its_own_is_the_same_kernel():
  """XLA of jax 0.11 writes `fusion-start` with operands, result and a context as its shape."""
  module, entry, instruction = fusion(STARTED)
  assert (instruction.opcode, instruction.shape) == ("fusion", fusion(PLAIN)[2].shape)
  assert cost.traffic(module, entry, instruction) == 2 * 2000 + 4
  assert cost.is_free(entry["d"])
