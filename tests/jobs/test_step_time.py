"""The model of a step's seconds, part by part, against figures worked out by hand."""

import itertools
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale import models
from jaxscale.collectives.planner import Dim, Link, torus_seconds
from jaxscale.experiment.derive import derive
from jaxscale.hlo import Memory, parse
from jaxscale.jobs.site import load_site
from jaxscale.planning import fits, kernels, machine, step_plan, timeline, transfer
from jaxscale.planning.fits import Fit, RefusedError
from jaxscale.planning.job import RunLength, job_of, savings
from jaxscale.planning.machine import CORNERS, Machine, hosts, rates_of
from jaxscale.planning.step_plan import Compiled, Step, compile_step, step_on
from jaxscale.planning.topologies import Chips
from jaxscale.training.flops import count_flops
from support.configs import small_config
from support.errors import config_error
from support.recipes import AlexNetModule

# A chip of 1 TFLOP/s and 1 GB/s, of which kernels reach all, and no other seconds.
PLAIN = dict(peak_bfloat16=2e12, peak_float32=1e12, bandwidth=1e9, launch=0.0, units=1)
PLAIN |= dict.fromkeys(("memory", "matmul", "convolution", "attention"), 1.0)
PLAIN |= dict(half_waves=0.0, half_depth=0.0)

# %a takes 2 ms of traffic (1 MB read, 1 MB written); what is sent runs while it does.
STEP = """HloModule step, is_scheduled=true, num_partitions=4
%body (c: (s32[], f32[250000])) -> (s32[], f32[250000]) {
  %c = (s32[], f32[250000]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[250000]{0} get-tuple-element(%c), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %b = f32[250000]{0} negate(%x)
  %r = f32[250000]{0} all-reduce(%b), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %t = (s32[], f32[250000]{0}) tuple(%next, %r)
}
%done (c: (s32[], f32[250000])) -> pred[] {
  %c = (s32[], f32[250000]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %three = s32[] constant(3)
  ROOT %p = pred[] compare(%i, %three), direction=LT
}
ENTRY %main (p: f32[250000]) -> f32[250000] {
  %p = f32[250000]{0} parameter(0)
  %s = f32[250000]{0} all-reduce-start(%p), replica_groups={{0,2},{1,3}}, to_apply=%add
  %a = f32[250000]{0} negate(%p)
  %d = f32[250000]{0} all-reduce-done(%s)
  %zero = s32[] constant(0)
  %start = (s32[], f32[250000]{0}) tuple(%zero, %a)
  %w = (s32[], f32[250000]{0}) while(%start), condition=%done, body=%body
  ROOT %out = f32[250000]{0} get-tuple-element(%w), index=1
}
"""
MESH = {"replica": 2, "data": 2}


def times(seconds_of):
  return timeline.Program(STEP, MESH).times(PLAIN, lambda c: seconds_of["+".join(c.axes)])


@pytest.mark.parametrize("sent, exposed", [(1e-3, 0.0), (2e-3, 0.0), (5e-3, 3e-3)])
def test_what_runs_during_compute_is_hidden(sent, exposed):
  found = times({"replica": sent, "data": 4e-3})
  # Each trip of the loop computes 2 ms (and 12 bytes of a counter), then waits.
  assert found.compute["memory"] == pytest.approx(8e-3, rel=1e-4)
  assert found.exposed["replica"] == pytest.approx(exposed, abs=1e-9)
  assert found.exposed["data"] == pytest.approx(3 * 4e-3)
  assert found.sent == pytest.approx({"replica": sent, "data": 12e-3})
  assert found.total == pytest.approx(8e-3 + exposed + 12e-3, rel=1e-4)


def kernel(line, *operands):
  """Return the kernel of an instruction in a program of its own."""
  named = [f"  %p{i} = {shape} parameter({i})" for i, shape in enumerate(operands)]
  lines = ["ENTRY %m () -> f32[1] {", *named, f"  ROOT %x = {line}", "}"]
  (module,) = parse.modules("\n".join(lines))
  home = module.computations["m"]
  return kernels.kernel_of(module, home, home["x"])


LABELS = "dim_labels=b01f_01io->b01f"
CUDNN = 'custom_call_target="__cudnn$conv'


DOT = "lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}"
CONVOLVED = f"f32[2,14,14,24] convolution(%p0, %p1), window={{size=3x3}}, {LABELS}"
BACKWARD = f'(f32[3,3,12,24], u8[0]) custom-call(%p0, %p1), {LABELS}, {CUDNN}BackwardFilter"'
X, W, DY = "f32[2,16,16,12]", "f32[3,3,12,24]", "f32[2,14,14,24]"
PRODUCTS = {
  f"f32[8,64,16] dot(%p0, %p1), {DOT}": ("matmul", (64, 16, 32, 8), "f32[8,64,32]", "f32[8,32,16]"),
  CONVOLVED: ("convolution", (2 * 14 * 14, 24, 108, 1), X, W),
  BACKWARD: ("convolution", (108, 24, 2 * 14 * 14, 1), X, DY),
  "f32[64] negate(%p0)": ("memory", (), "f32[64]"),
}


@pytest.mark.parametrize("line", PRODUCTS)
def test_the_product_of_a_kernel(line):
  kind, dims, *operands = PRODUCTS[line]
  found = kernel(line, *operands)
  assert found.kind == kind and found.dims == pytest.approx(dims)
  assert found.flops == (2 * math.prod(dims) if dims else 0)


def test_fused_attention_counts_half_of_a_causal_mask():
  text = (
    '(bf16[2,4,256,64], u8[0]) custom-call(%p0), custom_call_target="__cudnn$fmhaSoft'
    'maxBackward", backend_config={"intermediate_tensor_shape": {"dimensions": '
    '["2", "4", "256", "256"]}, "mask_type": "CAUSAL"}'
  )
  found = kernel(text, "bf16[2,256,4,64]")
  assert found.kind == "attention" and found.dtype == "bf16"
  assert found.flops == 5 * 2 * (2 * 4 * 256 * 256 * 64) / 2


# As libtpu 0.0.51 writes a kernel of Pallas, over several lines.
SPLASH = """ENTRY %%m () -> bf16[4,512,64] {
  %%splash_mha_%s_residuals.1 = (f32[4,512,64]{2,1,0}, bf16[4,512,64]{2,1,0}) custom-call(), \
custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,1,1]{2,1,0}, \
bf16[4,512,64]{2,1,0}, bf16[2,512,64]{2,1,0}%s}, frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="pallas_call"}
  ROOT %%x = bf16[4,512,64]{2,1,0} get-tuple-element(%%splash_mha_%s_residuals.1), index=1
}"""
DOCUMENTS, POSITIONS = ", s32[512,128]{1,0}, s32[8,512]{1,0}", ", s32[512,128]{1,0}"


@pytest.mark.parametrize(("name", "products"), [("fwd", 2), ("dq", 3), ("dkv", 4)])
def test_splash_attention_counts_its_products(name, products):
  tpu = rates_of("v5e").at("expected")
  for masks, share in (("", 1), (DOCUMENTS, 1), (POSITIONS, 0.5), (DOCUMENTS + POSITIONS, 0.5)):
    (module,) = parse.modules(SPLASH % (name, masks, name))
    first, _ = module.computations["m"].values()  # and what follows the metadata
    found = kernels.kernel_of(module, module.computations["m"], first)
    assert found.kind == "attention" and found.flops == products * 2 * 4 * 512**2 * 64 * share
    expected = found.flops / (tpu["peak_bfloat16"] * tpu["attention"])
    assert kernels.seconds(found, tpu) == expected


CUBLAS = """HloModule m
ENTRY %%m (p: f32[64,64]) -> f32[64,64] {
  %%p = f32[64,64]{1,0} parameter(0)
  ROOT %%x = f32[64,64]{1,0} custom-call(%%p, %%p), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"alpha_real":1,"beta":0,"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]},\
"precision_config":{"operand_precision":["%s","%s"],"algorithm":"ALG_UNSET"}}}
}"""


@pytest.mark.parametrize("precision", [None, "highest"])
def test_full_float32_is_seen_in_programs(precision):
  """A product in a compiled program, and one that XLA gives to cuBLAS."""
  x = jax.ShapeDtypeStruct((64, 64), jax.numpy.float32)
  step = jax.jit(lambda x: jax.numpy.sin(jax.numpy.matmul(x, x, precision=precision)))
  name = precision.upper() if precision else "DEFAULT"
  for program in (step.lower(x).compile().as_text(), CUBLAS % (name, name)):
    (module,) = parse.modules(program)
    found = [
      kernels.kernel_of(module, body, instruction)
      for body in module.computations.values()
      for instruction in body.values()
    ]
    products = [kernel for kernel in found if kernel.kind == "matmul"]  # with its callers
    assert {(k.is_full, k.flops) for k in products} == {(precision == "highest", 2 * 64**3)}


def test_seconds_of_a_kernel():
  slow = kernels.Kernel("matmul", 4e12, 1e9, (128, 128, 1, 1), "bf16")
  assert kernels.seconds(slow, PLAIN) == pytest.approx(2.0)  # at its peak
  assert kernels.seconds(slow._replace(dtype="f32"), PLAIN) == pytest.approx(4.0)
  assert kernels.seconds(slow._replace(bytes=9e9), PLAIN) == pytest.approx(9.0)
  full = slow._replace(dtype="f32", is_full=True)
  assert kernels.seconds(full, PLAIN | {"peak_full_float32": 5e11}) == pytest.approx(8.0)
  assert kernels.seconds(slow, PLAIN | {"half_waves": 1.0, "launch": 0.5}) == pytest.approx(4.5)
  tpu = rates_of("v5e").at("expected")
  assert kernels.seconds(slow._replace(cycles=3e9), tpu) == pytest.approx(2.0)


def nodes_of(axes, sizes, per_node):
  """Devices and nodes of the group of device 0, by listing them all."""
  places = np.stack(np.unravel_index(np.arange(math.prod(sizes.values())), tuple(sizes.values())))
  fixed = [i for i, axis in enumerate(sizes) if axis not in axes]
  group = np.flatnonzero((places[fixed] == 0).all(axis=0))
  nodes = {*(group // per_node).tolist()}
  return len(group) // len(nodes), len(nodes)


@pytest.mark.parametrize("per_node", [1, 2, 4, 8, 64])
@pytest.mark.parametrize(
  "sizes", [{"replica": 2, "data": 8, "model": 4}, {"data": 16}, {"a": 4, "b": 2}]
)
def test_where_a_group_is(sizes, per_node):
  for n in range(1, len(sizes) + 1):
    for axes in itertools.combinations(sizes, n):
      assert transfer.split(axes, sizes, per_node) == nodes_of(axes, sizes, per_node)


def test_seconds_of_collectives():
  from jaxscale.hlo import Collective

  near, far = Link(1e-6, 1e-9), Link(1e-5, 1e-8)
  sent = "all-reduce", "r", ("f32",), 1_000_000, 0.0, (), 8, ("data",)
  row = Collective(*sent, 1, True, False, False, None)

  def took(kind, sizes, **changes):
    return transfer.seconds(row._replace(kind=kind, **changes), sizes, 4, (near, far))

  # A ring of 4 in the node, and one of two nodes for the quarter that is left.
  dims, links = (Dim(("n",), 4), Dim(("w",), 2, 4)), {"n": near, "w": far}
  assert took("all-reduce", {"data": 8}) == pytest.approx(torus_seconds(dims, 1e6, links), rel=0.02)
  assert took("all-gather", {"data": 8}) == took("all-reduce", {"data": 8}) / 2
  assert took("all-reduce", {"data": 1}) == 0.0
  # Half of what each sends leaves the node.
  assert took("all-to-all", {"data": 8}) == pytest.approx(1e-5 + 0.5e6 * 1e-8)
  assert took("collective-permute", {"data": 8}) == pytest.approx(1e-5 + 1e-2)
  assert took("collective-permute", {"data": 4}) == pytest.approx(1e-6 + 1e-3)
  assert took("collective-permute", {"data": 4}, groups=((0, 0),)) == 0.0


@pytest.mark.parametrize("chip", machine.known_chips())
def test_constants_say_where_they_are_from(chip):
  rates = rates_of(chip)
  for name, constant in rates.constants.items():
    assert constant.kind in ("published", "measured", "assumed"), name
    assert constant.kind == "assumed" or constant.source or name == "devices_per_chip"
  slow, mean, fast = (machine.links(rates.at(c)) for c in CORNERS)
  for a, b, c in zip(slow, mean, fast, strict=True):
    assert a.beta >= b.beta >= c.beta > 0 and a.alpha >= b.alpha >= c.alpha
  assert not rates.is_calibrated
  if "cycles" not in rates.constants:
    product = kernels.Kernel("matmul", 1e12, 1e6, (4096, 4096, 4096, 1), "bf16")
    took = [kernels.seconds(product, rates.at(c)) for c in CORNERS]
    assert took == sorted(took, reverse=True)
    assert took[2] > 1e12 / rates.constants["peak_bfloat16"].value
    single = product._replace(kind="convolution", dtype="f32")
    share = PLAIN | {"convolution_float32": 0.5}
    assert kernels.seconds(single, share) == 2 * kernels.seconds(single, PLAIN)


def test_a_sites_constants_take_the_place_of_a_chips(tmp_path):
  path = tmp_path / "alps.toml"
  path.write_text("[machine]\nmatmul = 0.5\nmemory = 0.5\nnetwork_link = 25e9\n")
  rates = rates_of("h100", load_site(str(path)).machine)
  assert rates.is_calibrated
  assert {rates.at(c)["matmul"] for c in CORNERS} == {0.5}
  assert rates.constants["matmul"].kind == "site"


DAMAGED = {
  b"[machine]\nmatmul = 2": "Machine.matmul=2",
  b"[machine]\nmatmull = 1": "did you mean 'matmul'",
  b"machine = 3": "machine",
  b"[machine]\nlaunch = nan": "Machine.launch",
  b"\xff\x00": "alps.toml",
  b"[" * 10_000: "alps.toml",
}


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_site_is_one_line(text, tmp_path):
  path = tmp_path / "alps.toml"
  path.write_bytes(text)
  with config_error(DAMAGED[text]):
    load_site(str(path))


def compiled_step():
  """STEP on four devices, as if it had been compiled for them."""
  mesh, memory = SimpleNamespace(shape=MESH), Memory(1, 0, 0, 0)
  fit = Fit(memory, None, 1, 0.0, None, mesh)
  return Compiled(1, 4, timeline.Program(STEP, MESH), fit)


def test_communication_slows_compute_at_the_same_time():
  config, alone = small_config(mesh=cfg.Mesh(replica=2)), {}
  for share in (0.0, 0.5):
    rates = rates_of("h100", Machine(contention=share))
    alone[share] = step_on(config, [compiled_step()], rates, 4, 1)
  parts = alone[0.5].parts
  exposed = sum(s for name, s in parts.items() if name.startswith("exposed"))
  hidden = sum(alone[0.5].sent.values()) - exposed
  assert hidden > 0
  assert parts["contention"] == pytest.approx(hidden / 2)
  assert "contention" not in alone[0.0].parts
  took = [alone[share].seconds["expected"] for share in (0.0, 0.5)]
  assert took[1] - took[0] == pytest.approx(hidden / 2)


def test_fewer_simulated_devices_have_the_rows_of_all(monkeypatch):
  """Also in phases with batch sizes of their own, which were left as they were."""
  seen = []
  fit = SimpleNamespace(compiled=None)
  monkeypatch.setattr(fits, "compile_for", lambda config, chips: seen.append(config) or fit)
  monkeypatch.setattr(fits, "line", lambda fit, chips: "is only looked at")
  chips = Chips("cpu-32", None, [0] * 8, "cpu", 32)
  phases = cfg.Phases(epochs=(0, 1), batch_sizes=(64, 128))
  with pytest.raises(RefusedError, match="is only looked at"):
    compile_step(small_config(batch_size=64, phases=phases), chips)
  assert (seen[0].batch_size, seen[0].phases.batch_sizes) == (16, (16, 32))
  with config_error("batch size 66", "give a multiple of 32"):
    wrong = cfg.Phases(epochs=(0, 1), batch_sizes=(64, 66))
    compile_step(small_config(batch_size=64, phases=wrong), chips)


def test_a_program_that_cannot_be_read_is_one_line(monkeypatch):
  class Unreadable:
    def as_text(self):
      raise RuntimeError("INTERNAL: 1 operands but sees 3\n*** Begin stack trace ***")

  derived = SimpleNamespace(derived=SimpleNamespace(device_batch_size=1))
  fit = Fit(None, None, 1, 0.0, Unreadable(), None, derived)
  monkeypatch.setattr(fits, "compile_for", lambda *_: fit)
  chips = Chips("v6e-16", None, [0] * 16)
  with pytest.raises(RefusedError, match="v6e-16: the step compiles") as e:
    compile_step(small_config(), chips)
  assert "\n" not in str(e.value)


def test_the_slowest_of_many():
  draws = np.random.default_rng(0).normal(size=(4000, 256)).max(axis=1)
  assert step_plan.slowest_of(256) == pytest.approx(draws.mean(), rel=0.02)


def a_step(devices=64, **seconds):
  took = {"low": 0.3, "expected": 0.2, "high": 0.1} | seconds
  return Step(devices, devices // 8, 1024, 16, took, {}, {}, 0.2, 0.0, True)


def test_a_job_with_failures_and_a_price():
  at = Machine(save_rate=1e9, mtbf_hours=800, watts=700, price_chip_hour=2.0, start=100)
  run = RunLength(steps=36_000, evaluations=10, eval_examples=1024, saves=20, state_bytes=10**10)
  job = job_of(run, a_step(), rates_of("h100", at))
  assert job.train["expected"] == 7200 and job.save == 200
  assert job.evaluate["expected"] == pytest.approx(10 * 0.2 / 3)
  mtbf = 3600 * 800 / 8

  def lost(interval):  # a second of training loses saves, and half of them repeated
    return 10 / interval + interval / 2 / mtbf

  around = np.linspace(0.2, 5, 4801) * job.interval
  assert job.interval == pytest.approx(around[np.argmin(lost(around))], rel=1e-3)
  uninterrupted = 7200 + 200 + 100 + 10 * 0.2 / 3
  assert job.restarts == pytest.approx(uninterrupted / mtbf)
  assert job.lost == pytest.approx(job.restarts * (job.interval / 2 + 100))
  hours = (uninterrupted + job.lost) / 3600
  assert job.chip_hours == pytest.approx(64 * hours)
  assert job.kwh == pytest.approx(0.7 * 64 * hours)
  assert job.price == pytest.approx(2 * 64 * hours)
  free = job_of(run, a_step(), rates_of("h100"))
  assert (free.interval, free.restarts, free.kwh, free.price) == (None, 0, None, None)


def test_the_savings_of_a_growing_batch_by_hand():
  """16,000 examples: 500 steps of 16, 125 of 32, 62.5 of 64; a step takes 1 ms + 0.1 ms a row."""
  phases = cfg.Growing(when=cfg.AtExamples(examples=(8_000, 12_000)), max_batch_size=64)
  config = small_config(phases=phases, epochs=10)
  experiment = SimpleNamespace(config=config, derived=derive(config, 1_600, 100, 8))

  def planned(devices, rows):
    took = {c: (1e-3 + 1e-4 * rows) * x for c, x in {"low": 2, "expected": 1, "high": 0.5}.items()}
    return a_step(devices, **took)._replace(rows=rows, batch_size=devices * rows)

  found = savings(experiment, [planned(8, 2), planned(16, 1)], planned)
  assert [s.devices for s in found] == [8, 16]
  assert all(s.steps == {16: 500, 32: 125, 64: 63} for s in found)
  assert found[0].seconds["expected"] == pytest.approx(500 * 1.2e-3 + 125 * 1.4e-3 + 63 * 1.8e-3)
  assert found[1].seconds["low"] == pytest.approx(2 * (500 * 1.1e-3 + 125 * 1.2e-3 + 63 * 1.4e-3))
  assert found[0].constant_steps == pytest.approx(1_000, abs=2)  # The last step may be too large.
  assert found[0].constant_seconds == found[0].constant_steps * planned(8, 2).seconds["expected"]
  constant = small_config(epochs=10)
  plain = SimpleNamespace(config=constant, derived=derive(constant, 1_600, 100, 8))
  assert savings(plain, [planned(8, 2)], planned) == ()


HOSTS = {"v5e": {256: 64, 8: 1, 16: 4}, "v6e": {512: 128}, "v4": {32: 8}, "v5p": {4: 1}}
HOSTS |= {"v3": {64: 8}, "h100": {64: 8}, "knl": {64: 64}}


@pytest.mark.parametrize("chip", HOSTS)
def test_hosts_load_and_fail_not_slices(chip):
  rates = rates_of(chip, Machine(save_rate=1e9, mtbf_hours=800, input_rate=100.0))
  run = RunLength(steps=36_000, evaluations=1, eval_examples=1, saves=20, state_bytes=10**10)
  for devices, number in HOSTS[chip].items():
    job = job_of(run, a_step(devices), rates)
    seconds = job.hours["expected"] * 3600 - job.lost
    assert job.restarts == pytest.approx(seconds * number / (3600 * 800))
    parts = step_plan._parts(step_plan.Times({}, {}, {}), rates, "expected", devices, 1024)
    assert sum(parts.values()) == pytest.approx(1024 / number / 100)


def test_a_site_sets_its_hosts():
  assert hosts(32, rates_of("v4", Machine(per_host=2)).at("expected")) == 16
  assert hosts(64, rates_of("h100", Machine(per_node=4)).at("expected")) == 16


RESNET50 = models.ResNetModule((3, 4, 6, 3), bottleneck=True, num_classes=1000)
PUBLISHED = [(AlexNetModule(num_classes=1000), 227, 24.6), (RESNET50, 224, 308)]


@pytest.mark.parametrize("module, size, published", PUBLISHED)
def test_computation_to_communication_as_published(module, size, published):
  """arXiv:1709.05011: FLOPs of an image by parameters; ours are 4 % off, both.

  AlexNet's 1.45 GFLOPs are 1.5 there. Theirs is the ResNet-50 whose first layer of a
  block has the stride (7.7 GFLOPs), ours has it in the second (8.2).
  """
  functions = models.functions(module, (size, size, 3))
  params, state = jax.eval_shape(functions.init, jax.random.key(0))
  image = jax.ShapeDtypeStruct((1, size, size, 3), "uint8")

  def forward(params, state, image):
    return functions.apply(params, state, image, False, None)

  flops = count_flops(forward, params, state, image)
  parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  assert flops / parameters == pytest.approx(published, rel=0.04)
