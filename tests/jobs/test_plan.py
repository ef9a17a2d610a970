"""The planner against the published example and brute force; the benchmark."""

import itertools
import math
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

from jaxscale import cli, collectives
from jaxscale.collectives import Link, measurements, plan, planner
from jaxscale.collectives.measurements import fit_link
from jaxscale.collectives.planner import best_dims, factorizations, given_dims, pairs, torus_seconds
from support.cases import all_slow_except
from support.commands import child_env, own_lines
from support.errors import config_error
from support.paths import ROOT

# IBM DDL's 256 GPUs: four a node by NVLink, 64 nodes by InfiniBand (illustrative).
GPUS = {"node": 64, "gpu": 4}
RESNET50 = 102.4e6  # bytes of float32 gradients


def names(dims):
  return [str(d) for d in dims]


def test_256_devices_are_a_torus_of_4_by_8_by_8():
  chosen = plan(GPUS, 102e6)
  assert chosen.algorithm == "torus"
  assert names(chosen.dims) == ["gpu:4", "node:8", "node:8"]
  assert [d.stride for d in chosen.dims] == [1, 1, 8]
  ring = plan(GPUS, 102e6, "ring")
  assert names(ring.dims) == ["node+gpu:256"] and ring.seconds > 2.1 * chosen.seconds


EXAMPLE = [((64,), 132, 10.2), ((16, 4), 42, 9.98), ((8, 8), 34, 9.95)]


@pytest.mark.parametrize("nodes, steps, milliseconds", EXAMPLE)
def test_the_published_example(nodes, steps, milliseconds):
  dims = [("gpu", 4), *(("node", n) for n in nodes)]
  found = plan(GPUS, RESNET50, "torus", dims=dims)
  assert 2 * sum(d.size - 1 for d in found.dims) == steps
  assert 1e3 * found.seconds == pytest.approx(milliseconds, rel=0.005)
  assert 1e3 * plan(GPUS, RESNET50, "ring").seconds == pytest.approx(21.9, rel=0.005)


def simulated(dims, num_bytes, links):
  """Seconds of every step of both phases, one after another."""
  clock, block = 0.0, num_bytes
  sent = 0.0
  for dim in dims:
    block /= dim.size
    for _ in range(dim.size - 1):
      link = links[dim.axes[0]]
      clock += link.alpha + link.beta * block
      sent += block
  return 2 * clock, 2 * sent


def every_torus(sizes):
  """All dimensions of all factorizations of the axes, in all their orders."""
  for factors in itertools.product(*(factorizations(n) for n in sizes.values())):
    flat = [(a, n) for a, ns in zip(sizes, factors, strict=True) for n in ns]
    for order in set(itertools.permutations(flat)):
      yield given_dims(order, sizes)


@pytest.mark.parametrize("seed", range(6))
def test_the_plan_is_the_best_of_all(seed, monkeypatch):
  rng = np.random.default_rng(seed)
  sizes = [{"a": 8, "b": 6}, {"a": 12}, {"a": 2, "b": 4, "c": 5}][seed % 3]
  links = {a: Link(10 ** rng.uniform(-6, -4), 10 ** rng.uniform(-11, -9)) for a in sizes}
  num_bytes = 10 ** rng.uniform(4, 9)
  every = list(every_torus(sizes))
  costs = []
  for dims in every:
    seconds, sent = simulated(dims, num_bytes, links)
    assert torus_seconds(dims, num_bytes, links) == pytest.approx(seconds)
    assert sent == pytest.approx(2 * num_bytes * (1 - 1 / math.prod(sizes.values())))
    costs.append(seconds)
  with monkeypatch.context() as patch:
    patch.setattr(planner, "TOLERANCE", 0.0)
    exact = best_dims(sizes, num_bytes, links)
  assert torus_seconds(exact, num_bytes, links) == pytest.approx(min(costs))
  # The fewest within a hundredth, and of those the best.
  near = [len(d) for d, c in zip(every, costs, strict=True) if c <= 1.01 * min(costs)]
  chosen = best_dims(sizes, num_bytes, links)
  assert len(chosen) == min(near)
  same = [c for d, c in zip(every, costs, strict=True) if len(d) == len(chosen)]
  assert torus_seconds(chosen, num_bytes, links) == pytest.approx(min(same))


def test_small_messages_take_few_steps():
  small, large = plan({"data": 64}, 1e3), plan({"data": 64}, 1e9)
  assert small.algorithm == "halving_doubling" and len(small.dims) == 6
  assert large.algorithm == "ring" and names(large.dims) == ["data:64"]
  late = {"data": Link(1e-4, 1e-10)}
  assert len(plan({"data": 64}, 1e8, links=late).dims) > 1
  assert plan({"data": 1}, 1e6) == ("psum", ("data",), (), 0.0)
  # The fast axis is the one with the better link, wherever it is in the mesh.
  swapped = {"node": Link(1e-6, 1e-11), "gpu": Link(1e-6, 1e-9)}
  assert names(plan(GPUS, 1e9, links=swapped).dims)[-1] == "gpu:4"
  for num_bytes in (0, 1e8):
    assert plan({"data": 13}, num_bytes).algorithm == "ring"
  with config_error("needs powers of two, but axis data has 13 devices; use 'torus' or 'psum'"):
    plan({"data": 13}, 0, "halving_doubling")


def test_neighbours_are_a_permutation_along_the_dimension():
  for dim in given_dims([("a", 2), ("a", 3), ("a", 2)], {"a": 12}):
    moved = dict(pairs(dim, 12, 1))
    assert sorted(moved.values()) == list(range(12))
    place = 0
    for _ in range(dim.size):
      place = moved[place]
    assert place == 0 and moved[0] == dim.stride


NEGATIVE = dict.fromkeys(GPUS, Link(-1.0, 0.0))
MISTAKES = {
  "did you mean 'torus'?": lambda: plan(GPUS, 1.0, "tours"),
  "links has no axis 'node'": lambda: plan(GPUS, 1.0, links={"gpu": Link(0.0, 0.0)}),
  "did you mean 'gpu'?": lambda: plan(GPUS, 1.0, links={"gpus": Link(0.0, 0.0)}),
  "give alpha, beta >= 0": lambda: plan(GPUS, 1.0, links=NEGATIVE),
  "sizes of gpu multiply to 0": lambda: plan(GPUS, 1.0, "torus", dims=[("node", 64), ("gpu", 0)]),
}


@pytest.mark.parametrize("says", MISTAKES)
def test_mistakes_are_one_line(says):
  with config_error(says):
    MISTAKES[says]()


def test_a_fit_finds_the_links_it_was_made_of():
  rng, sizes = np.random.default_rng(0), np.logspace(3, 8, 12)
  for n, link in [(2, Link(2e-5, 1e-10)), (8, Link(1e-6, 3e-9))]:
    exact = 2 * (n - 1) * (link.alpha + link.beta * sizes / n)
    assert fit_link(n, sizes, exact)[:2] == pytest.approx(link[:2])
    noisy = exact * rng.uniform(0.9, 1.1, len(sizes))
    assert fit_link(n, sizes, noisy)[:2] == pytest.approx(link[:2], rel=0.1)
  # Nothing below zero, whatever was measured.
  assert fit_link(4, [1e3, 1e6], [5e-3, 1e-3])[1] == 0.0
  assert fit_link(4, [1e3, 1e6], [1e-9, 1e-3])[0] == 0.0


def test_calls_take_turns():
  order = []
  calls = {name: (lambda n=name: order.append(n)) for name in "abc"}
  seconds = measurements.in_turns(calls, rounds=3)
  assert "".join(order) == "aabbcc" + "abc" + "bca" + "cab"
  assert all(len(s) == 3 for s in seconds.values())


OPTIONS = {
  "--mesh=2x3": "--mesh=2x3: needs 6 devices; give sizes whose product is 8",
  "--mesh=2y4": "give sizes of axes, as 2x4",
  "--sizes=4TB": "give bytes, as 4KB,1MB",
  "--rounds=0": "give a whole number >= 1",
  "--dtype=float33": "did you mean 'float32'?",
  "--algorithms=ring,psun": "did you mean 'psum'?",
  "--size=1KB": "did you mean '--sizes'?",
  "--mesh": "a value is missing",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_mistake_on_the_command_line(option, capsys):
  assert cli.main(["bench", option]) == 2
  out, err = capsys.readouterr()
  assert out == "" and err.startswith("error: ") and err.count("\n") == 1
  assert OPTIONS[option] in err


@pytest.mark.parametrize("processes", all_slow_except([1, 2], 1))
def test_the_benchmark_measures_fits_and_plans(processes):
  with socket.socket() as s:
    s.bind(("localhost", 0))
    port = s.getsockname()[1]
  command = [sys.executable, "-m", "jaxscale", "bench", "--mesh=2x2", "--sizes=1KB,100KB"]
  many = {"JAXSCALE_COORDINATOR": f"localhost:{port}", "JAXSCALE_NUM_PROCESSES": str(processes)}
  options = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  started = []
  for i in range(processes):
    env = child_env(4 // processes, **many, JAXSCALE_PROCESS_ID=str(i))
    started.append(subprocess.Popen([*command, "--rounds=3"], env=env, **options))
  done = [p.communicate(timeout=300) for p in started]
  assert [p.returncode for p in started] == [0] * processes, done
  text = done[0][0]
  assert f"mesh replica 2, data 2; processes {processes};" in text
  assert not any(own_lines(out) for out, _ in done[1:]), "the leader alone prints"
  for axis in ("replica", "data"):
    assert re.search(rf"^{axis}: alpha [\d.]+ us, beta ", text, re.M)
  rows = re.findall(r"^ *(1,000|100,000)  (\w+) +([\d.]+) ", text, re.M)
  expected = itertools.product(("1,000", "100,000"), collectives.ALGORITHMS)
  assert [(size, name) for size, name, _ in rows] == list(expected)
  assert all(float(took) > 0 for *_, took in rows)
  for num_bytes in ("1,000", "100,000"):
    took = {name: float(ms) for size, name, ms in rows if size == num_bytes}
    (fastest,) = re.findall(rf"^plan for {num_bytes} bytes: (\w+)", text, re.M)
    assert took[fastest] == min(took.values())
