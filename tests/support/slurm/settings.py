"""slurm.conf of a cluster for tests, and the files that go with it.

No munge, no systemd, no cgroups, no database, and short waits. The settings are
those of https://slurm.schedmd.com/slurm.conf.html, cgroup.conf.html, gres.conf.html.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from support.slurm import hosts as slurm_hosts


class Settings(NamedTuple):
  """Settings of a cluster, see `SlurmCluster`."""

  cpus: int
  gpus: int
  extra: str


# SchedulerParameters: look for work every second. cred_expire: as short as may be
# (120 s by default, and less than 5 counts as that); a requeued job does not start
# before. Do not hurry it by `scontrol update StartTime=now`: what is still known of
# the run before then ends this one, 2 times in 100 where it was tried.
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=login({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=5
SlurmdTimeout=5
MessageTimeout=5
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmctldPidFile={folder}/login/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdSpoolDir={folder}/%n/spool
StateSaveLocation={folder}/login/state
SlurmctldLogFile={folder}/login/slurmctld.log
SlurmdLogFile={folder}/%n/slurmd.log
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MailProg=/bin/true
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE
"""


def write(folder: Path, net: str, port: int, ports: Mapping[str, int], settings: Settings) -> None:
  """Write the files of a cluster.

  Args:
    folder: where they go, and what the daemons write.
    net: of the hosts' addresses.
    port: the controller's.
    ports: each node's, in the order of their addresses.
    settings: the rest.
  """
  head = _CONFIGURATION.format(folder=folder, address=slurm_hosts.address(net, 0), port=port)
  gpus = f"Gres=gpu:{settings.gpus}" if settings.gpus else ""
  nodes = "".join(
    f"NodeName={node} NodeHostname={node} NodeAddr={slurm_hosts.address(net, i)} "
    f"Port={own} CPUs={settings.cpus} RealMemory=4000 {gpus}\n"
    for i, (node, own) in enumerate(ports.items(), 1)
  )
  if settings.gpus:
    nodes = f"GresTypes=gpu\n{nodes}"
    _write_gpus(folder, settings.gpus)
  (folder / "slurm.conf").write_text(f"{head}{nodes}{settings.extra}\n")
  # Else slurmd looks for a cgroup file system, and dies where none is mounted.
  (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def _write_gpus(folder: Path, count: int) -> None:
  for i in range(count):
    with contextlib.suppress(FileExistsError):
      os.mknod(folder / f"gpu{i}", 0o20666, os.stat("/dev/null").st_rdev)
  text = f"AutoDetect=off\nName=gpu File={folder}/gpu[0-{count - 1}]\n"
  (folder / "gres.conf").write_text(text)
