"""The Slurm that tests start: another program may take a port before it does."""

import socket

from support.slurm import cluster


def test_a_taken_port_is_not_the_end(monkeypatch):
  """The next try has other ports, and nothing of the first is left."""
  free_ports, folders = cluster._free_ports, []
  with socket.create_server(("", 0)) as taken:
    port = taken.getsockname()[1]

    def one_taken(count):
      folders.append(own.folder)
      ports = free_ports(count)
      return [port, *ports[1:]] if len(folders) == 1 else ports

    monkeypatch.setattr(cluster, "_free_ports", one_taken)
    own = cluster.SlurmCluster(nodes=1)
    with own:
      assert own.run("sinfo", "-h", "-o", "%t").stdout.split() == ["idle"]
      assert len(folders) == 2 and not folders[0].exists()
