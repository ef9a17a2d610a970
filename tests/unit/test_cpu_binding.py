"""Binding of processes to CPUs, on nodes that are folders of files."""

import os
import subprocess
import sys

import pytest

from jaxscale.cluster import cpu_binding
from jaxscale.cluster.cpu_binding import Cpus, choose, cores_of, find_cpus, gpu_devices, parse_cpus
from jaxscale.cluster.rendezvous.handshake import shares
from support.rendezvous import who

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"
# PCI addresses of 8 GPUs, as in a DGX H100: the first four are beside node 0.
BUSES = ["1b", "43", "52", "61", "9d", "c3", "d1", "df"]
NUMA = {0: "0-15,32-47", 1: "16-31,48-63"}  # two sockets of 16 cores with two threads each


def write(folder, files):
  for name, content in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
  return str(folder)


def gpu_files(i, node, cpus, model=H100):
  bus = f"0000:{BUSES[i]}:00.0"
  text = f"Model: \t\t {model}\nGPU UUID: \t GPU-{i}\nDevice Minor: \t {i}\n"
  pci = f"sys/bus/pci/devices/{bus}"
  files = {f"proc/driver/nvidia/gpus/{bus}/information": text, f"dev/nvidia{i}": ""}
  return files | {f"{pci}/numa_node": f"{node}\n", f"{pci}/local_cpulist": f"{cpus}\n"}


def cpu_files(numa=NUMA, half=32):
  files = {f"sys/devices/system/node/node{n}/cpulist": f"{c}\n" for n, c in numa.items()}
  for cpus in numa.values():
    for cpu in parse_cpus(cpus):
      path = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
      files[path] = f"{cpu % half},{cpu % half + half}\n"
  return files


@pytest.fixture
def node(tmp_path):
  """Return the root of a node with two NUMA nodes of four GPUs each."""
  files = cpu_files()
  for i in range(8):
    files |= gpu_files(i, i // 4, NUMA[i // 4])
  return write(tmp_path, files)


@pytest.fixture
def may_run_on(monkeypatch):
  """Return a function that sets the CPUs that this process seems to be allowed."""
  return lambda text: monkeypatch.setattr(os, "sched_getaffinity", lambda _: parse_cpus(text))


def bindings(masks, gpu_ids, root, env=None, seen=8):
  """Return the bindings of a node's processes, by way of their hellos at the rendezvous."""
  found = []
  real = os.sched_getaffinity
  for mask, ids in zip(masks, gpu_ids, strict=True):
    os.sched_getaffinity = lambda _, mask=mask: parse_cpus(mask)
    try:
      found.append(find_cpus(seen, ids, env or {}, root))
    finally:
      os.sched_getaffinity = real
  hellos = {i: who(i, len(found), node="n1", cpus=cpus.usable) for i, cpus in enumerate(found)}
  return [choose(c, tuple(s), root) for c, s in zip(found, shares(hellos), strict=True)]


def test_eight_processes_divide_the_cores_beside_their_gpus(node):
  made = bindings(["0-63"] * 8, [[i] for i in range(8)], node)
  assert sorted(made[0].cpus) == [0, 1, 2, 3, 32, 33, 34, 35]  # whole cores
  assert sorted(made[5].cpus) == [20, 21, 22, 23, 52, 53, 54, 55]
  assert sum(len(each.cpus) for each in made) == len(set().union(*(b.cpus for b in made))) == 64
  assert made[0].line == "CPUs: 0-3,32-35 of NUMA node 0, beside GPU 0, a share of 1/4"


def test_two_processes_have_a_socket_each_and_one_has_all(node):
  made = bindings(["0-63"] * 2, [[0, 1, 2, 3], [4, 5, 6, 7]], node)
  assert [b.cpus for b in made] == [parse_cpus(NUMA[0]), parse_cpus(NUMA[1])]
  assert made[1].line == "CPUs: 16-31,48-63 of NUMA node 1, beside GPUs 4-7"
  assert bindings(["0-63"], [None], node) == [(None, "")]
  made = bindings(["0-63"] * 2, [[0], [1]], node, {"CUDA_VISIBLE_DEVICES": "7,0"}, 2)
  assert [b.cpus for b in made] == [parse_cpus(NUMA[1]), parse_cpus(NUMA[0])]


def test_what_slurm_or_taskset_has_set_is_kept(node):
  # Slurm bound each task to its own cores beside its GPU: nothing is left to do.
  masks = ["0-3", "4-7", "16-19", "20-23"]
  assert bindings(masks, [[0], [1], [4], [5]], node) == [(None, "")] * 4
  # A cgroup of 24 CPUs for all tasks, of which 8 are beside node 1.
  made = bindings(["0-15,24-31"] * 4, [[0], [1], [4], [5]], node)
  ends = [(0, 8), (8, 16), (24, 28), (28, 32)]
  assert [sorted(b.cpus) for b in made] == [[*range(*two)] for two in ends]
  # Cores of the other socket only.
  (made,) = bindings(["16-31"], [[0]], node)
  assert made.cpus is None
  assert made.line == (
    "CPUs: not those of NUMA node 0, beside GPU 0 (0-15,32-47): this process may run on 16-31 "
    "only, as its launcher or taskset has set"
  )


@pytest.mark.parametrize(
  "env, gpus",
  [
    ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
    ({"CUDA_VISIBLE_DEVICES": "6,1"}, [6, 1]),
    ({"CUDA_VISIBLE_DEVICES": "GPU-3, GPU-0"}, [3, 0]),
    ({"CUDA_VISIBLE_DEVICES": "MIG-4c"}, []),
    ({"CUDA_VISIBLE_DEVICES": "9"}, []),
    ({"CUDA_VISIBLE_DEVICES": ""}, []),
  ],
)
def test_the_order_of_gpus_is_that_of_cuda(env, gpus, node):
  names = [f"0000:{BUSES[i]}:00.0" for i in gpus]
  assert [path.name for path in gpu_devices(env, node)] == names


def test_gpus_of_other_jobs_are_not_counted(node):
  for i in range(4):
    os.remove(f"{node}/dev/nvidia{i}")
  assert [path.name[5:7] for path in gpu_devices({}, node)] == BUSES[4:]


def test_gpus_of_several_models_need_cudas_order_by_address(tmp_path):
  files = gpu_files(0, 0, "0-3") | gpu_files(1, 1, "4-7", A100)
  root = write(tmp_path, files)
  assert gpu_devices({}, root) == []
  assert len(gpu_devices({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, root)) == 2


def test_amds_gpus(tmp_path, may_run_on):
  files = {"sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 64\n"}
  for i, node in ((1, 1), (2, 0), (10, 0)):
    path = f"sys/class/kfd/kfd/topology/nodes/{i}/properties"
    files[path] = f"simd_count 304\ndrm_render_minor {127 + i}\n"
    files |= {f"dev/dri/renderD{127 + i}": "", "dev/kfd": ""}
    device = f"sys/class/drm/renderD{127 + i}/device"
    files |= {f"{device}/numa_node": f"{node}", f"{device}/local_cpulist": NUMA[node]}
  root = write(tmp_path, files)
  may_run_on("0-63")
  assert find_cpus(3, [0], {}, root).near == NUMA[1]
  assert find_cpus(3, [2], {}, root).near == NUMA[0]
  assert find_cpus(1, [0], {"HIP_VISIBLE_DEVICES": "1"}, root).near == NUMA[0]
  env = {"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "1"}
  assert find_cpus(1, None, env, root).near == NUMA[0]


@pytest.mark.parametrize("node, cpus", [("-1", "0-63"), ("", "0-63"), ("0", ""), ("0", "x-y")])
def test_odd_values_leave_the_node_undivided_by_socket(node, cpus, tmp_path):
  """A machine with one NUMA node has -1; containers may lack the files."""
  root = write(tmp_path, gpu_files(0, node, cpus) | gpu_files(1, node, cpus))
  made = bindings(["0-7"] * 2, [[0], [1]], root, seen=2)
  assert [sorted(b.cpus) for b in made] == [[0, 1, 2, 3], [4, 5, 6, 7]]
  assert made[0].line == "CPUs: 0-3 of 0-7, a share of 1/2"
  assert bindings(["0-7"], [[0]], root, seen=2) == [(None, "")]


def test_processes_on_cpus_divide_them_by_socket(tmp_path):
  # Consecutive CPUs alternate between the sockets of some machines.
  numa = {0: "0,2,4,6", 1: "1,3,5,7"}
  root = write(tmp_path, {f"sys/devices/system/node/node{n}/cpulist": c for n, c in numa.items()})
  made = bindings(["0-7"] * 2, [None] * 2, root, seen=0)
  assert [sorted(b.cpus) for b in made] == [[0, 2, 4, 6], [1, 3, 5, 7]]
  # Too few cores for each, or bound apart: left as they are.
  assert bindings(["0-2"] * 2, [None] * 2, root, seen=0) == [(None, "")] * 2
  assert bindings(["0-3", "4-7"], [None] * 2, root, seen=0) == [(None, "")] * 2


def test_hyper_threads_stay_together(node):
  assert cores_of({0, 32, 5, 37, 20}, node) == [[0, 32], [5, 37], [20]]


def test_processes_on_other_nodes_or_with_other_cpus_do_not_share():
  hellos = {0: who(0, cpus="0-7", node="a"), 1: who(1, cpus="0-7", node="b")}
  hellos |= {2: who(2, cpus="0-7", node="a"), 3: who(3, cpus="0-3", node="a")}
  assert shares(hellos) == [[0, 2], [0, 1], [1, 2], [0, 1]]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_all_threads_are_bound_but_those_bound_before():
  code = """
import os, threading, time
from jaxscale.cluster.cpu_binding import bind
first, second, *_ = sorted(os.sched_getaffinity(0))
own, done = threading.Event(), threading.Event()
def work(pin):
  if pin:
    os.sched_setaffinity(0, {second})
    own.set()
  done.wait()
threads = [threading.Thread(target=work, args=(pin,)) for pin in (False, True)]
for thread in threads:
  thread.start()
own.wait()
bind({first})
masks = [os.sched_getaffinity(thread.native_id) for thread in threads]
print(os.sched_getaffinity(0) == masks[0] == {first}, masks[1] == {second})
done.set()
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert done.stdout.split() == ["True", "True"], done.stderr


def test_lists_of_cpus():
  for text in ("0", "0-3,8", "1,3,5-6"):
    assert cpu_binding.format_cpus(parse_cpus(text)) == text
  for text in ("", "x", "3-1", "0-99999999", "-1", "0-3,"):
    assert parse_cpus(text) == set()
  assert choose(Cpus("")) == (None, "")
