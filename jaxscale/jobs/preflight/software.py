"""The check `software`: versions, host names, system limits and GPUs."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxscale.cluster import gpu_settings
from jaxscale.cluster.detect import Launch, visible_gpus
from jaxscale.cluster.group import Group, gather
from jaxscale.cluster.rendezvous import handshake, network
from jaxscale.files import output_of, readable_text, whole_number
from jaxscale.jobs.preflight.finding import Facts, Finding, Results, outliers
from jaxscale.metrics.text import byte_size

PACKAGES = """
jax jaxlib jaxscale flax optax orbax-checkpoint tensorflow-datasets numpy jax-cuda12-plugin
jax-cuda13-plugin nvidia-nccl-cu12 nvidia-nccl-cu13 libtpu
""".split()
_SMI_S = 15.0  # seconds; without persistence mode the driver takes seconds to load
# NCCL has its buffers between processes of a node in /dev/shm. Docker's default of 64 MiB is
# too small, and the remedy is --shm-size=1g (docs.nvidia.com/deeplearning/nccl,
# "Troubleshooting", "Shared memory").
_LEAST_SHM = 1 << 30
_NOTHING = "nothing"  # stands for the address of a name that does not resolve


def measure(group: Group, options: Any, facts: Facts) -> dict[str, Any]:
  """Return the versions, limits and GPUs of this process."""
  driver, gpus = nvidia()
  return {
    "versions": handshake.versions(PACKAGES) | ({"NVIDIA driver": driver} if driver else {}),
    "hostname": socket.gethostname(),
    "loopback": loopback(socket.gethostname()),
    "network": network.namespace("net"),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "locked": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    "infiniband": any(Path("/sys/class/infiniband").glob("*")),
    "shm": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
    "gpus": gpus or amd(),
  }


def loopback(name: str) -> str:
  """Return the loopback address of a host's own name; "" if its address is not loopback.

  Gloo, and NCCL's bootstrap by default, send other hosts the address to which the host
  name resolves locally (measured: "Connection refused, remote=[127.0.0.1]").
  """
  try:
    results = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
  except OSError as e:
    return f"{_NOTHING} ({e.strerror or e})"
  addresses = [str(info[4][0]) for info in results]
  local = [a for a in addresses if a.startswith("127.") or a == "::1"]
  return local[0] if local and len(local) == len(addresses) else ""


def nvidia() -> tuple[str, list[dict[str, Any]]]:
  """Return the driver's version, and the processes, memory and errors of visible GPUs.

  `nvidia-smi` ignores CUDA_VISIBLE_DEVICES, so GPUs that the variable hides by number or
  UUID are removed from its output. Call this before this process uses a GPU.
  """
  gpus = _smi(
    "gpu",
    "index,uuid,name,driver_version,memory.used,memory.total,ecc.errors.uncorrected.volatile.total",
  )
  gpus = [row for row in gpus if len(row) == 7]
  if not gpus:
    return "", []
  processes = _smi("compute-apps", "gpu_uuid,pid,used_memory,process_name")
  chosen, results = os.environ.get("CUDA_VISIBLE_DEVICES"), []
  names = None if chosen is None else re.findall(r"[^,\s]+", chosen)
  for index, uuid, _, _, used, total, errors in gpus:
    starts = (n for n in names or () if n[:4] in ("GPU-", "MIG-"))
    if names is not None and index not in names and not uuid.startswith((*starts,)):
      continue
    on_it = [row for row in processes if len(row) == 4 and row[0] == uuid]
    gpu = {"index": index, "used": _mib(used), "total": _mib(total)}
    gpu["errors"] = whole_number(errors) or 0
    gpu["processes"] = [f"{row[1]} ({row[3]}, {row[2]} MiB)" for row in on_it]
    results.append(gpu)
  return gpus[0][3], results


def amd(root: str = "/") -> list[dict[str, Any]]:
  """Return the memory and memory errors of AMD's visible GPUs, from the files of their driver.

  Linux describes the files in Documentation/gpu/amdgpu. They do not list processes, and
  count all memory in use, so call this before this process uses a GPU.

  Args:
    root: the root of the file system, for tests.
  """
  results = []
  for file in sorted(Path(root).glob("sys/class/drm/renderD*/device/mem_info_vram_total")):
    folder, device = file.parent, Path(root, "dev/dri", file.parts[-3])
    used, total = (
      whole_number(readable_text(folder / f"mem_info_vram_{name}").strip()) or 0
      for name in ("used", "total")
    )
    errors = re.search(r"ue: (\d{1,18})", readable_text(folder / "ras/umc_err_count"))
    gpu = {"index": device.name, "used": used, "total": total, "processes": []}
    if os.access(device, os.R_OK | os.W_OK):  # Slurm denies access to the others.
      results.append(gpu | {"errors": int(errors[1]) if errors else 0})
  return results


def check_gpu_settings(group: Group, launch: Launch) -> list[Finding]:
  """Compare the variables that a run would set for its GPUs; process 0 has findings."""
  chosen = gpu_settings.choose_here(launch, visible_gpus(os.environ))
  own = {"missing": chosen.missing, "lines": gpu_settings.lines(chosen, short=True)}
  results = gather(group, "GPU settings", own)
  return [] if group.rank else settings_findings(results, group.hosts)


def settings_findings(results: Results, hosts: Sequence[str]) -> list[Finding]:
  """Return findings on GPU settings; both arguments are by rank."""
  wrong = []
  for missing in dict.fromkeys(each["missing"] for each in results if each["missing"]):
    ranks = [rank for rank, each in enumerate(results) if each["missing"] == missing]
    text, _, remedy = missing.partition("; ")
    where = handshake.ranks_with_hosts(ranks, hosts)
    wrong.append(Finding(False, f"{where}: {text}", remedy))
  usual, others = outliers({r: "".join(each["lines"]) for r, each in enumerate(results)}, hosts)
  for other, where in others.items():
    text = f"{where}: {other or 'no GPU settings'}, unlike the others ({usual})"
    remedy = "use nodes with the same GPUs and network, or set the variables yourself"
    wrong.append(Finding(False, text, remedy))
  return wrong or ([Finding(True, usual)] if usual else [])


def _smi(what: str, fields: str) -> list[list[str]]:
  """Return the rows of `nvidia-smi --query-...`; [] if it is missing or fails."""
  command = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"]
  lines = (output_of(*command, timeout_s=_SMI_S) or "").splitlines()
  return [re.split(r",\s*", line.strip()) for line in lines if line]


def _mib(text: str) -> int:
  return int(float(text) * 2**20) if re.fullmatch(r"\d{1,18}(\.\d+)?", text) else 0


def findings(results: Results, group: Group, options: Any, facts: Facts) -> list[Finding]:
  """Return findings on the results of `measure`."""
  return [f for part in (_versions, _names, _limits, _gpus) for f in part(results, group.hosts)]


def _versions(results: Results, hosts: Sequence[str]) -> list[Finding]:
  """Return findings on processes whose versions differ from the majority."""
  wrong, shown = [], []
  for name in dict.fromkeys(name for each in results for name in each["versions"]):
    by_rank = {r: each["versions"].get(name, "none") for r, each in enumerate(results)}
    usual, others = outliers(by_rank, hosts)
    shown.append(f"{name} {usual}")
    remedy = f"use nodes, or an environment, with the same {name}"
    if name in PACKAGES:
      remedy = f"install the same version everywhere, e.g. pip install {name}=={usual}"
    for other, where in others.items():
      wrong.append(Finding(False, f"{name} {other} on {where}, {usual} on the others", remedy))
  same = " in all processes" if len(results) > 1 else ""
  return wrong or [Finding(True, f"versions{same}: {', '.join(shown)}")]


def _names(results: Results, hosts: Sequence[str]) -> Iterator[Finding]:
  """Yield findings on hosts whose own name resolves to loopback, if there are others."""
  if len({each["hostname"] for each in results}) < 2:
    return
  # Hosts with the same network namespace reach each other over loopback.
  apart = len({each["network"] for each in results}) > 1
  for host, each in dict(zip(hosts, results, strict=True)).items():
    address = each["loopback"]
    if address and (apart or address.startswith(_NOTHING)):
      text = f"{host}: its own name resolves to {address} there, which other hosts "
      remedy = f"on {host} remove its name from the line of 127.0.0.1 or 127.0.1.1 in "
      remedy += "/etc/hosts, or give it a name that resolves"
      yield Finding(False, f"{text}cannot reach", remedy)


def _limits(results: Results, hosts: Sequence[str]) -> list[Finding]:
  """Return findings on system limits that later fail in MPI, NCCL or the rendezvous."""
  # A run needs three sockets per process, and files of data and checkpoints. It raises its
  # soft limit itself, up to the hard one.
  needed, wrong = 3 * len(hosts) + 256, []
  for host, each in dict(zip(reversed(hosts), reversed(results), strict=True)).items():
    hard, locked, shm = each["files"][1], each["locked"], each["shm"]
    if 0 <= hard < needed:
      text = f"at most {hard} open files are allowed, but {needed} may be needed"
      remedy = "raise the hard limit there (ulimit -Hn, LimitNOFILE of slurmd)"
      wrong.append((host, text, remedy))
    if each["infiniband"] and locked != -1 and locked < 1 << 30:
      text = f"only {byte_size(locked)} of memory may be locked, and InfiniBand locks its buffers"
      remedy = "let slurmd start with LimitMEMLOCK=infinity, and PropagateResource"
      remedy += "LimitsExcept=MEMLOCK in slurm.conf (ulimit -l unlimited)"
      wrong.append((host, text, remedy))
    if each["gpus"] and shm is not None and shm < _LEAST_SHM:
      text = f"/dev/shm has only {byte_size(shm)}, and NCCL shares buffers there"
      wrong.append((host, text, "start the container with --shm-size=1g or more"))
  bad = [Finding(False, f"{host}: {text}", remedy) for host, text, remedy in wrong]
  return bad or [Finding(True, "limits: open files, locked memory, /dev/shm")]


def _gpus(results: Results, hosts: Sequence[str]) -> list[Finding]:
  """Return findings on GPUs with other processes or with memory errors."""
  wrong, seen = [], {}
  for host, each in zip(hosts, results, strict=True):  # processes may see the same GPUs
    seen |= {(host, gpu["index"]): gpu for gpu in each["gpus"]}
  for (host, index), gpu in seen.items():
    where, busy = f"GPU {index} of {host}", gpu["processes"]
    if busy or gpu["used"] > max(1 << 30, gpu["total"] // 10):
      who = f"process {', '.join(busy)}" if busy else "an invisible process"
      text = f"{where}: {byte_size(gpu['used'])} in use by {who}"
      wrong.append(Finding(False, text, f"end the process, or exclude {host}"))
    if count := gpu["errors"]:
      text = f"{where}: {count} uncorrected memory errors since it was reset"
      wrong.append(Finding(False, text, f"exclude {host} and have the GPU reset"))
  if seen and not wrong:
    return [Finding(True, f"GPUs: {len(seen)} visible, not in use by other processes")]
  return wrong
