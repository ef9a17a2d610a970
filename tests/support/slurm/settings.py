"""slurm.conf of a cluster for tests, and related files.

No munge, no systemd, no cgroups, no database, and short waits. The settings are
those of https://slurm.schedmd.com/slurm.conf.html and cgroup.conf.html.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from support.slurm import hosts as slurm_hosts

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


def write(folder: Path, net: str, port: int, ports: Mapping[str, int], cpus: int, extra: str):
  """Write the files of a cluster.

  Args:
    folder: the folder of the files and of the daemons' output.
    net: the prefix of the hosts' addresses.
    port: the port of the controller.
    ports: the port of each node, in the order of their addresses.
    cpus: the CPUs per node.
    extra: further lines.
  """
  head = _CONFIGURATION.format(folder=folder, address=slurm_hosts.address(net, 0), port=port)
  nodes = "".join(
    f"NodeName={node} NodeHostname={node} NodeAddr={slurm_hosts.address(net, i)} "
    f"Port={own} CPUs={cpus} RealMemory=4000\n"
    for i, (node, own) in enumerate(ports.items(), 1)
  )
  (folder / "slurm.conf").write_text(f"{head}{nodes}{extra}\n")
  # Else slurmd looks for a cgroup file system, and dies where none is mounted.
  (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
