"""Launch detection in a Kubernetes pod or on a Cloud TPU host.

Kubernetes sets JOB_COMPLETION_INDEX in the pods of an Indexed Job and gives each pod the
host name JOB-INDEX. The name resolves under the headless service that is the Job's
subdomain (kubernetes.io, "Indexed Job", "Job with Pod-to-Pod Communication"). Kubernetes
has no variable for the number of pods. JAX gets it from the API server, which needs a
package and a permission; jaxscale reads JAXSCALE_NUM_PROCESSES. Kubeflow's JAXJob sets all
variables.

A TPU pod on Kubernetes has TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, and several slices have
MEGASCALE_*. They are read as in jax/_src/clusters/cloud_tpu_cluster.py (0.10.2).
"""

from __future__ import annotations

import importlib.util
import re
import socket
from pathlib import Path

from jaxscale.cluster.launch import Env, Launch, number
from jaxscale.errors import ConfigError
from jaxscale.files import readable_text

_GOOGLE = "0x1ae0"  # PCI vendor, jax/_src/hardware_utils.py


def detect_kubernetes(env: Env) -> Launch | None:
  """Identify this pod in an Indexed Job; None outside of Kubernetes.

  An unknown number of processes is 0, and an unknown host is None.
  """
  if "KUBERNETES_SERVICE_HOST" not in env:
    return None
  index = number(env, "JOB_COMPLETION_INDEX")
  # A worker of Kubeflow's JAXJob: envvar.go of its training operator, 1.9.
  if index is None and (address := env.get("COORDINATOR_ADDRESS")):
    rank, count = number(env, "PROCESS_ID"), number(env, "NUM_PROCESSES")
    if rank is None or count is None:
      return None
    job, port = f"kubernetes-{address}", number(env, "COORDINATOR_PORT")
    return Launch("kubernetes", rank, count, address, job=job, port=port)
  if index is None:
    return Launch("single", note="runs as one process: this pod is not part of an Indexed Job")
  count = number(env, "JAXSCALE_NUM_PROCESSES") or 0
  own = env.get("HOSTNAME", "")
  name = re.fullmatch(rf"(.+)-{index}", own)
  if not name:
    return Launch("kubernetes", index, count, None, job="kubernetes")
  full = socket.getfqdn()
  # Without a subdomain, other pods cannot resolve a pod's name.
  first = f"{name[1]}-0{full[len(own) :]}" if full.startswith(f"{own}.") else None
  return Launch("kubernetes", index, count, first, job=f"kubernetes-{name[1]}")


def detect_tpu(env: Env) -> Launch | None:
  """Identify this host in a TPU pod with a list of hosts; None elsewhere."""
  listed = env.get("TPU_PROCESS_ADDRESSES") or env.get("TPU_WORKER_HOSTNAMES")
  index = number(env, "TPU_WORKER_ID")
  if not listed or index is None or not _wanted(env):
    return None
  hosts = [re.sub(r":\d+$", "", h.strip()) for h in listed.split(",") if h.strip()]
  slices = number(env, "MEGASCALE_NUM_SLICES") or 1
  slice_id = number(env, "MEGASCALE_SLICE_ID") or 0
  if not (index < len(hosts) and slice_id < slices):
    problem = f"out of range, since TPU_WORKER_HOSTNAMES lists {len(hosts)} hosts"
    fix = "correct the pod's variables"
    raise ConfigError(f"TPU_WORKER_ID={index}: {problem}; {fix}")
  count = len(hosts) * slices
  first = re.sub(r":\d+$", "", env.get("MEGASCALE_COORDINATOR_ADDRESS", "")) or hosts[0]
  rank, nodes = slice_id * len(hosts) + index, tuple(hosts) if slices == 1 else ()
  return Launch("tpu", rank, count, first, job=f"tpu-{first}", nodes=nodes)


def on_cloud_tpu(env: Env) -> bool:
  """Return whether this host has TPU chips and libtpu, by JAX's own test."""
  if not _wanted(env) or importlib.util.find_spec("libtpu") is None:
    return False
  vendors = map(readable_text, Path("/sys/bus/pci/devices").glob("*/vendor"))
  return any(vendor.strip() == _GOOGLE for vendor in vendors)


def _wanted(env: Env) -> bool:
  platforms = env.get("JAX_PLATFORMS", "")
  return not platforms or "tpu" in platforms
