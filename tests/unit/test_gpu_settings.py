"""Settings for GPUs, on nodes that are folders of files."""

import os
import subprocess
import sys

import pytest

from jaxscale.cluster import environment, gpu_settings
from jaxscale.cluster.detect import Launch
from jaxscale.cluster.detect.fabric import Fabric, find_fabric, nvidia_models
from jaxscale.cluster.gpu_settings import LEVEL, Choice, Hardware, choose, lines
from jaxscale.cluster.rendezvous.handshake import find_mismatches, make_hello
from jaxscale.errors import ConfigError
from jaxscale.jobs.preflight import software
from support.tables import assignments, columns

H100 = "NVIDIA H100 80GB HBM3"
TWO = Launch("slurm", 0, 8, "n1", 0, 4, nodes=("n1", "n1", "n2", "n2"))


@pytest.fixture
def node(tmp_path):
  """Return a function that writes files of /sys, /proc and /etc by their paths."""

  def write(files):
    for name, content in files.items():
      path = tmp_path / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(content)
    return str(tmp_path)

  return write


def adapter(name, layer, *, state="4: ACTIVE", vendor="0x15b3"):
  folder = f"sys/class/infiniband/{name}"
  port = {"link_layer": f"{layer}\n", "state": f"{state}\n"}
  files = {f"{folder}/ports/1/{key}": text for key, text in port.items()}
  return files | {f"{folder}/device/vendor": f"{vendor}\n"}


def gpu(model, bus="0000:1b:00.0"):
  text = f"Model: \t\t {model}\nIRQ:   \t\t 83\nGPU UUID: \t GPU-1\n"
  return {f"proc/driver/nvidia/gpus/{bus}/information": text}


HSN = {f"sys/class/net/hsn{i}/mtu": "9000" for i in (10, 0, 1, 2)}
EFA = adapter("efa_0", "Unspecified", vendor="0x1d0f")
PLUGIN = "\0libnccl-net.so\0/opt/amazon/lib/libnccl-net.so\0"
NODES = {
  "ethernet": ({"sys/class/net/eth0/mtu": "1500"}, Fabric("ethernet")),
  "infiniband": (
    adapter("mlx5_3", "Ethernet", state="1: DOWN")
    | {k: v for i in (0, 10, 2) for k, v in adapter(f"mlx5_{i}", "InfiniBand").items()},
    Fabric("infiniband", ("mlx5_0", "mlx5_2", "mlx5_10")),
  ),
  "mixed": (
    adapter("mlx5_0", "InfiniBand") | adapter("mlx5_1", "Ethernet"),
    Fabric("infiniband", ("mlx5_0",), ("mlx5_1",)),
  ),
  "roce": (adapter("mlx5_0", "Ethernet"), Fabric("ethernet", (), ("mlx5_0",))),
  "efa": (EFA, Fabric("efa")),
  "efa, plugin": (EFA | {"etc/ld.so.cache": PLUGIN}, Fabric("efa", has_plugin=True)),
  "slingshot": (HSN, Fabric("slingshot", ("hsn0", "hsn1", "hsn2", "hsn10"))),
  "slingshot, no names": ({"sys/class/cxi/cxi0/uevent": ""}, Fabric("slingshot")),
}


@pytest.mark.parametrize("name", NODES)
def test_fabrics(name, node):
  files, fabric = NODES[name]
  assert find_fabric({}, node(files)) == fabric


def test_a_plugin_on_the_loaders_path(node):
  root = node(HSN | {"opt/[x]/libnccl-net-ofi.so.0": "", "opt/empty/x": ""})
  paths = [f"{root}/opt/empty", "", f"{root}/opt/[x]"]
  for some in (paths[:2], paths):
    found = find_fabric({"LD_LIBRARY_PATH": ":".join(some)}, root)
    assert found.has_plugin == (some == paths)


def place(files, node, launch=TWO, gpus=4, **env):
  return gpu_settings.hardware_of(launch, gpus, range(1), env, node(files))


def test_places(node, monkeypatch):
  here = place(HSN | gpu(H100) | gpu("NVIDIA GH200 480GB", "1"), node)
  assert nvidia_models(node({})) == here.models == ("NVIDIA GH200 480GB", H100)
  assert here.is_hopper and here.has_peers and here.has_nodes and here.is_alone
  alone = place({}, node, Launch("single"), gpus=1)
  assert not (alone.has_peers or alone.has_nodes) and alone.is_alone
  one_node = place({}, node, Launch("slurm", 0, 4, "n1", 0, 4))
  assert one_node.has_peers and not one_node.has_nodes and not one_node.is_slingshot
  assert place({}, node, Launch("explicit", 0, 2, "n1")).has_nodes  # nobody knows
  for env in ({"JAX_LOCAL_DEVICE_IDS": "0"}, {"SLURM_NTASKS_PER_GPU": "2"}):
    assert not place({}, node, **env).is_alone
  for models in ((H100, "NVIDIA B200"), ("NVIDIA H20x",), ()):
    assert not Hardware(8, models).is_hopper
  # The graphics of a processor from AMD, beside GPUs from NVIDIA.
  assert not place({"dev/kfd": ""} | gpu(H100), node).is_amd


# Nodes, and what is set there in a run of two of them.
FOR_ALL = {"XLA_CLIENT_MEM_FRACTION": "0.9", LEVEL: "O1"}
AMD = assignments("GPU_MAX_HW_QUEUES=2 HIP_FORCE_DEV_KERNARG=1 HSA_FORCE_FINE_GRAIN_PCIE=1")
HPE = assignments("""
  NCCL_CROSS_NIC=1 NCCL_NET_GDR_LEVEL=PHB FI_CXI_RX_MATCH_MODE=hybrid
  FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DISABLE_HOST_REGISTER=1 FI_CXI_DEFAULT_CQ_SIZE=131072
  FI_CXI_DEFAULT_TX_SIZE=2048 NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn10
""")
HOPPER = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
CHOSEN = {
  "ethernet": ({}, FOR_ALL),
  "infiniband": (gpu(H100), FOR_ALL | HOPPER),
  "mixed": (gpu("NVIDIA B200"), FOR_ALL | {"NCCL_IB_HCA": "=mlx5_0"}),
  "efa": ({}, FOR_ALL),
  "slingshot": ({"dev/kfd": ""}, FOR_ALL | HPE | AMD),
  "slingshot, no names": (
    gpu("NVIDIA GH200 120GB") | {"etc/ld.so.cache": "libnccl-net-ofi.so"},
    FOR_ALL | HOPPER | HPE | {"NCCL_NET": "AWS Libfabric", "NCCL_SOCKET_IFNAME": "hsn"},
  ),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_chosen(name, node):
  added, wanted = CHOSEN[name]
  choice = choose(place(NODES[name][0] | added, node), {"HOME": "/"})
  assert choice.values == wanted and choice.kept == ()
  lacks_plugin = name in ("efa", "slingshot")
  assert bool(choice.missing) == lacks_plugin
  assert len(lines(choice)) == 1 + lacks_plugin


def test_on_one_gpu_little_is_set(node):
  assert choose(Hardware(1, (H100,)), {}).values == {"XLA_CLIENT_MEM_FRACTION": "0.9"}
  amd = place({"dev/kfd": ""}, node, Launch("single"), gpus=1)
  assert choose(amd, {}).values == {"XLA_CLIENT_MEM_FRACTION": "0.9"} | AMD
  assert choose(Hardware(1, is_alone=False), {}) == choose(Hardware(0), {}) == Choice()


def test_the_optimization_level_is_raised_only_between_nodes(node):
  one_node = place(gpu(H100), node, Launch("slurm", 0, 4, "n1", 0, 4))
  assert one_node.has_peers
  expected = {"XLA_CLIENT_MEM_FRACTION": "0.9", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
  assert choose(one_node, {}).values == expected
  assert choose(place(gpu(H100), node), {}).values[LEVEL] == "O1"


FRACTIONS = columns(assignments, float)("""
A=1 | 0.9
XLA_CLIENT_MEM_FRACTION=.5 | 0.5
XLA_PYTHON_CLIENT_MEM_FRACTION=.6 | 0.6
XLA_PYTHON_CLIENT_PREALLOCATE=false | 0.75
""")


@pytest.mark.parametrize("env, fraction", FRACTIONS, ids=[str(env) for env, _ in FRACTIONS])
def test_the_memory_that_jax_takes(env, fraction):
  assert gpu_settings.memory_fraction(choose(Hardware(1), env), env) == fraction


@pytest.mark.parametrize("text", ["0", "1.5", "nan", "most"])
def test_a_memory_fraction_that_is_none(text):
  env = {"XLA_CLIENT_MEM_FRACTION": text}
  with pytest.raises(ConfigError, match=f"^XLA_CLIENT_MEM_FRACTION={text} .*set it to e.g. 0.9"):
    gpu_settings.memory_fraction(choose(Hardware(1), env), env)


# What the user has set, and what is then left alone.
KEPT = columns(assignments, str)(f"""
XLA_CLIENT_MEM_FRACTION=.5 | XLA_CLIENT_MEM_FRACTION
XLA_PYTHON_CLIENT_MEM_FRACTION=.5 | XLA_CLIENT_MEM_FRACTION
XLA_PYTHON_CLIENT_PREALLOCATE=false | XLA_CLIENT_MEM_FRACTION
XLA_PYTHON_CLIENT_ALLOCATOR=platform | XLA_CLIENT_MEM_FRACTION
{LEVEL}=O0 | {LEVEL}
XLA_FLAGS=--xla_gpu_all_reduce_combine_threshold_bytes=1 | {LEVEL}
CUDA_DEVICE_MAX_CONNECTIONS= | CUDA_DEVICE_MAX_CONNECTIONS
NCCL_NET_PLUGIN=/opt/libmine.so | NCCL_NET
NCCL_NET=Socket | NCCL_NET
NCCL_CROSS_NIC=0 | NCCL_CROSS_NIC
""")
KEPT += [({"XLA_FLAGS": "--a=1\n--xla_gpu_enable_latency_hiding_scheduler=false"}, LEVEL)]


@pytest.mark.parametrize("env, name", KEPT, ids=[str(env) for env, _ in KEPT])
def test_the_users_own_stays(env, name):
  fabric = Fabric("slingshot", ("hsn0",), has_plugin=True)
  everywhere = Hardware(4, (H100,), True, True, True, fabric)
  all_of_them = choose(everywhere, {"XLA_FLAGS": "--xla_gpu_autotune_level=0"})
  assert all_of_them.kept == ()
  choice = choose(everywhere, env)
  assert set(all_of_them.values) - set(choice.values) == {name}
  assert choice.kept == (*env,)
  (line,) = lines(choice)
  assert f"kept as you set them: {next(iter(env))}; disable with --config.gpu_" in line
  silent = choose(everywhere._replace(fabric=fabric._replace(has_plugin=False)), env)
  assert bool(silent.missing) == ("NCCL_NET" not in name)


def test_they_are_set_and_recorded(monkeypatch):
  from jaxscale.run import provenance

  monkeypatch.setattr(gpu_settings, "_applied", {})
  for name in FOR_ALL:
    monkeypatch.delenv(name, raising=False)
  import jax

  before = jax.config.jax_optimization_level
  monkeypatch.setenv("NCCL_DEBUG", "WARN")
  try:
    gpu_settings.apply(choose(Hardware(8, has_nodes=True), gpu_settings.own()))
    assert jax.config.jax_optimization_level == "O1"  # JAX had read its variable
    start = provenance.environment()
    assert start["gpu_settings"] == FOR_ALL
    assert start["variables"].items() >= (FOR_ALL | {"NCCL_DEBUG": "WARN"}).items()
    # The next session of this process takes none of them for the user's.
    again = choose(Hardware(8, has_nodes=True), gpu_settings.own())
    assert again.values == FOR_ALL and again.kept == ()
    assert gpu_settings.shared() == {LEVEL: "O1", "NCCL_NET": "unset"}
    gpu_settings.apply(again)  # as the user's own by `jax.config.update`: it stays
    assert jax.config.jax_optimization_level == "O1"
  finally:
    jax.config.update("jax_optimization_level", before)
    for name in FOR_ALL:
      os.environ.pop(name, None)


def test_processes_that_differ_are_refused():
  same = {LEVEL: "O1", "NCCL_NET": "AWS Libfabric"}
  digests = enumerate([same, same, same | {"NCCL_NET": "unset"}])
  hellos = {i: make_hello(TWO._replace(process_id=i), d, on_cpu=False) for i, d in digests}
  (line,) = find_mismatches(hellos, {})
  assert "process 2" in line and "NCCL_NET differs from process 0" in line


def test_doctor_shows_them():
  chosen = lines(choose(Hardware(4, has_peers=True), {}))
  same, none = {"lines": chosen, "missing": ""}, {"lines": [], "missing": ""}
  hosts = ["n1", "n2", "n3"]
  (good,) = software.settings_findings([same, same], hosts)
  assert good.ok and good.text == chosen[0]
  (bad,) = software.settings_findings([same, same, none], hosts)
  assert not bad.ok and "process 2 (n3): no GPU settings" in bad.text
  slow = choose(Hardware(4, has_nodes=True, fabric=Fabric("efa")), {}).missing
  (bad,) = software.settings_findings([same, same | {"missing": slow}], hosts)
  assert bad.text.startswith("process 1 (n2): EFA without aws-ofi-nccl")
  assert bad.remedy == "load the site's module of aws-ofi-nccl"
  assert software.settings_findings([none], hosts) == []


def test_nothing_is_set_without_a_plugin_of_jax(monkeypatch):
  monkeypatch.setattr(environment, "_plugins", lambda: {"tpu"})
  assert gpu_settings.choose_here(TWO, 4) == Choice()
  monkeypatch.setattr(environment, "_plugins", lambda: {"xla_cuda12", "cuda"})
  assert gpu_settings.choose_here(TWO, 4, range(1)).values.keys() >= FOR_ALL.keys()
  assert gpu_settings.choose_here(TWO, 0) == Choice()


START = """
from pathlib import Path
from jaxscale.cluster import environment
from jaxscale.config.loading import load_config
environment._plugins = lambda: {"cuda"}
from jaxscale.cluster import gpu_settings
found = gpu_settings.hardware_of
gpu_settings.hardware_of = lambda *args: found(*args)._replace(has_nodes=True)
import os, sys
config = load_config("configs/digits.py", {"gpu_settings": sys.argv[1]})
from jaxscale.run.session import open_session
with open_session(config, Path(sys.argv[2])):
  assert "jax" not in sys.modules
  print(os.environ.get("JAX_OPTIMIZATION_LEVEL"), os.environ["XLA_FLAGS"])
  os.environ["JAX_PLATFORMS"] = "cpu"
  import jax
  jax.jit(lambda x: x + 1)(1.0)
  print(jax.config.jax_optimization_level)
"""


@pytest.mark.slow
def test_a_run_sets_them_before_jax_starts(tmp_path):
  """Expect that the installed JAX accepts all settings, on a machine with two simulated GPUs."""
  env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_PLAT", "XLA_"))}
  flags = "--xla_force_host_platform_device_count=1"
  env |= {"CUDA_VISIBLE_DEVICES": "0,1", "XLA_FLAGS": flags}

  def start(setting):
    command = [sys.executable, "-c", START, setting, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()

  line, *rest = start("True")
  assert line.startswith("GPU settings: XLA_CLIENT_MEM_FRACTION=0.9 (JAX takes 75 %")
  assert "JAX_OPTIMIZATION_LEVEL=O1 (overlaps collectives" in line
  assert rest == [f"O1 {flags}", "O1"]
  assert start("False") == [f"None {flags}", "UNKNOWN"]
