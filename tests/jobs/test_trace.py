"""Statistics of a step from hand-written traces; times are in us."""

import struct

import jax.profiler
import pytest

from jaxscale.errors import ConfigError
from jaxscale.planning import trace
from support.bad_files import NO_JSON
from support.errors import config_error

NAMES = "hlo_op hlo_module program_id step_num device_ordinal _pt _p _ct _c"
STATS = {name: i for i, name in enumerate(NAMES.split(), 1)}
HEAD = "\n".join(
  f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}' for name, i in STATS.items()
)


def plane(name, **lines):
  """Return an XPlane as text, from lines of (name, start, microseconds, stats)."""
  names = sorted({event[0] for line in lines.values() for event in line})
  metadata = "".join(
    f'event_metadata {{ key: {i} value {{ id: {i} name: "{n}" }} }}\n'
    for i, n in enumerate(names, 1)
  )

  def stat(key, value):
    kind = f'str_value: "{value}"' if isinstance(value, str) else f"int64_value: {value}"
    return f"stats {{ metadata_id: {STATS[key]} {kind} }}"

  def event(name, start, us, **stats):
    made = " ".join(stat(*item) for item in stats.items())
    span = f"offset_ps: {start * 10**6} duration_ps: {us * 10**6}"
    return f"events {{ metadata_id: {names.index(name) + 1} {span} {made} }}\n"

  made = "".join(
    f'lines {{ id: {i} name: "{line.replace("_", " ")}" timestamp_ns: 0\n'
    + "".join(event(*e[:3], **(e[3] if len(e) > 3 else {})) for e in events)
    + "}\n"
    for i, (line, events) in enumerate(lines.items())
  )
  return f'planes {{ name: "{name}" {HEAD} {metadata} {made} }}\n'


def field(number, value):
  """Return a protobuf field of bytes or text."""
  value = value.encode() if isinstance(value, str) else value
  assert len(value) < 2**14
  size = bytes([len(value) & 127 | 128, len(value) >> 7])
  return bytes([number << 3 | 2]) + size + value


def program(name, **instructions):
  """Return the plane of one HLO program, from (opcode, op_name) by instruction."""
  made = b"".join(
    field(2, field(1, n) + field(2, opcode) + field(7, field(2, where)))
    for n, (opcode, where) in instructions.items()
  )
  module = field(1, "jit_step") + field(3, field(1, "main") + made)
  stat = struct.pack("<BB", 1 << 3, 4) + field(6, field(1, module))
  entry = bytes([1 << 3, 9]) + field(2, field(2, name) + field(5, stat))
  return field(1, field(2, "/host:metadata") + field(4, entry))


def written(tmp_path, *planes, programs=b"", name="process_0"):
  content = jax.profiler.ProfileData.text_proto_to_serialized_xspace("".join(planes))
  path = tmp_path / f"{name}.xplane.pb"
  path.write_bytes(content + programs)  # messages that follow each other are merged
  return path


def op(name, **more):
  return {"hlo_op": name, "hlo_module": "jit_step", "program_id": 7} | more


def rows(summary):
  return [(o.name, o.part, round(o.seconds * 1e6, 3), o.count) for o in summary.ops]


PRODUCTS = [("gemm_kernel", 0, 40, op("dot.1")), ("gemm_kernel", 40, 20, op("dot.2"))]
STREAMS = {
  "Stream_13": [*PRODUCTS, ("fusion_kernel", 90, 10, op("fusion"))],
  "Stream_14": [("nccl_all_reduce", 50, 30, op("all-reduce-start.1"))],
  "XLA_Modules": [("jit_step", 0, 1000)],
  "Stream_15": [("void cub::Sum<float>(float*)", 95, 25)],
}
GPU = plane("/device:GPU:0", **STREAMS)
IN_STEP = [("train", 0, 90, {"step_num": 100}), ("input", 0, 30), ("step", 30, 60)]
IN_NEXT = [("train", 100, 100, {"step_num": 101}), ("saving", 190, 10), ("tsl::Internal", 0, 500)]
STEPS = plane("/host:CPU", python=[*IN_STEP, *IN_NEXT])
MADE_OF = {
  "dot.1": ("fusion", "jit(step)/shard_map/gradients/jvp(MLP)/dot_general"),
  "dot.2": ("fusion", "jit(step)/shard_map/gradients/transpose(jvp(MLP))/dot_general"),
  "fusion": ("fusion", "jit(step)/update/mul"),
  "all-reduce-start.1": ("all-reduce-start", "jit(step)/shard_map/(gradients/psum:exchange/psum)"),
}
PROGRAM = program("jit_step(7)", **MADE_OF)


def test_streams_of_a_gpu(tmp_path):
  summary = trace.summarize([written(tmp_path, GPU, STEPS, programs=PROGRAM)])
  assert rows(summary) == [
    ("dot.1", "forward", 40, 1),
    ("all-reduce-start.1", "exchange", 30, 1),
    ("void cub::Sum<float>(float*)", "other", 25, 1),
    ("dot.2", "backward", 20, 1),
    ("fusion", "update", 10, 1),
  ]
  assert summary.steps == (100, 101)
  # Busy from 0 to 80 and from 90 to 120, of 200.
  assert summary.idle == {"GPU:0": pytest.approx(1 - 110 / 200)}
  assert summary.seconds == pytest.approx(200e-6)
  wanted = {"input": 30e-6, "step": 60e-6, "saving": 10e-6}
  assert summary.host == pytest.approx(wanted) and list(summary.host) == list(wanted)
  lines = trace.text(summary, most=2).splitlines()
  assert lines[:4] == [
    "steps 100 to 101 in 200 us, 100 us each",
    "idle: 45% of the time, 1 device",
    "host: input 15%, step 30%, saving 5% of the time",
    "devices: forward 32%, backward 16%, exchange 24%, update 8%, other 20% of their operations",
  ]
  assert " ".join(lines[6].split()) == "dot.1 40 us 32.0% 1 forward gradients/jvp(MLP)/dot_general"
  assert len(lines) == 8


def test_a_loop_of_a_tpu_counts_for_what_nothing_in_it_covers(tmp_path):
  fusion, copy = "%fusion.1 = f32[8] fusion(%p)", "%copy-start = f32[8] copy-start(%p)"
  in_loop = [(fusion, 10, 30), ("%all-gather.2 = f32[8] all-gather(%p)", 50, 40)]
  ops = [("%loop.3 = (s32[], f32[8]) while(%t)", 0, 100), *in_loop, (fusion, 100, 60)]
  others = dict(Steps=[("100", 0, 500)], Async_XLA_Ops=[(copy, 0, 500)])
  device = plane("/device:TPU:0", XLA_Ops=ops, **others)
  made_of = {
    "loop.3": ("while", "jit(step)/gradients/while"),
    "fusion.1": ("fusion", "jit(step)/gradients/jvp(while)/body/mul"),
    "all-gather.2": ("all-gather", "jit(step)/gradients/all_gather"),
  }
  summary = trace.summarize([written(tmp_path, device, programs=program("jit_step(7)", **made_of))])
  assert rows(summary) == [
    ("fusion.1", "forward", 90, 2),
    ("all-gather.2", "communication", 40, 1),
    ("loop.3", "forward", 30, 1),
  ]
  assert summary.idle == {"TPU:0": 0} and summary.steps == ()
  assert "without a named step" in trace.text(summary)


def test_an_operation_of_a_cpu_may_end_in_another_thread(tmp_path):
  where = dict(device_ordinal=1, _pt=0)
  dot, copy = op("dot", **where, _p=77), op("copy", **where, _p=78)
  first = [("dot", 0, 10, dot), ("copy", 10, 10, copy), ("end: copy", 19, 1, {"_ct": 0, "_c": 78})]
  host = plane("/host:CPU", worker_1=first, worker_2=[("end: dot", 50, 1, {"_ct": 0, "_c": 77})])
  summary = trace.summarize([written(tmp_path, host)])
  assert rows(summary) == [("dot", "other", 50, 1), ("copy", "other", 10, 1)]
  assert summary.idle == {"CPU:1": 0}


def test_processes_are_added_up(tmp_path):
  """Which may have begun at other steps."""
  later = STEPS.replace("int64_value: 10", "int64_value: 30")
  files = [
    written(tmp_path, GPU, steps, name=f"process_{i}", programs=PROGRAM)
    for i, steps in enumerate((STEPS, later))
  ]
  assert trace.find(tmp_path) == files
  summary = trace.summarize(files)
  assert rows(summary)[0] == ("dot.1", "forward", 80, 2)
  assert list(summary.idle) == ["process_0 GPU:0", "process_1 GPU:0"]
  assert summary.steps == (100, 101, 300, 301)
  assert trace.text(summary).splitlines()[0] == "steps 100, 101, 300 and 301 in 200 us, 100 us each"
  assert summary.seconds == pytest.approx(200e-6)
  assert summary.host["input"] == pytest.approx(30e-6)


@pytest.mark.parametrize("content", [*NO_JSON.values(), PROGRAM, PROGRAM[:-7]])
def test_what_is_no_trace_is_one_line(tmp_path, content):
  (tmp_path / "a.xplane.pb").write_bytes(content)
  with config_error(match=r"a\.xplane\.pb: .*; "):
    trace.summarize(trace.find(tmp_path))


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_without_its_programs_a_trace_has_names_still(tmp_path, cut):
  """And where their form is not known; the rest of the file is whole."""
  (tmp_path / "whole").mkdir()
  damaged = PROGRAM[:-cut] + bytes([255]) * cut
  path = written(tmp_path, GPU, STEPS, programs=b"")
  assert len(trace._programs(path.read_bytes() + damaged)) < 12
  assert rows(trace.summarize([path]))[0] == ("dot.1", "other", 40, 1)


def test_a_program_of_the_compilation_cache_goes_by_its_old_number(tmp_path):
  """And an operation of another program is not taken for its own."""
  where = "jit(step)/shard_map/gradients/jvp(MLP)/dot_general"
  programs = program("jit_step(9)", **{"dot.1": ("fusion", where)})
  events = [("gemm", 0, 40, op("dot.1")), ("gemm", 40, 20, op("dot.1", hlo_module="jit_evaluate"))]
  device = plane("/device:GPU:0", Stream_1=events)
  summary = trace.summarize([written(tmp_path, device, programs=programs)])
  assert rows(summary) == [("dot.1", "forward", 40, 1), ("dot.1", "other", 20, 1)]


def test_names_of_others_reach_no_terminal(tmp_path):
  device = plane("/device:GPU:0", Stream_1=[(r"Mem\033[2Jcpy", 0, 5)])
  shown = trace.text(trace.summarize([written(tmp_path, device)]))
  assert "\x1b" not in shown and r"Mem\x1b[2Jcpy" in shown


def test_the_newest_trace_is_found_and_none_that_is_being_written(tmp_path):
  with pytest.raises(ConfigError, match=r"no trace, use a folder with"):
    trace.find(tmp_path)
  for name in (".12ab.tmp", "steps_1-2"):
    folder = tmp_path / "profile" / name
    folder.mkdir(parents=True)
    wanted = written(folder, GPU)
  assert trace.find(tmp_path) == [wanted] and trace.find(wanted) == [wanted]
