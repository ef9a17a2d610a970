"""One process of a preflight in a test: `python preflight_process.py JSON`."""

import json
import os
import socket
import sys
import time

from jaxscale import preflight
from jaxscale.preflight.group import make_group


def connect(rank, size, port):
  """Sockets as the meeting leaves them: to all in process 0, to it elsewhere."""
  if rank:
    return {0: socket.create_connection(("127.0.0.1", port), timeout=None)}
  with socket.create_server(("127.0.0.1", port), backlog=size) as server:
    print("listening", flush=True)
    links = [server.accept()[0] for _ in range(size - 1)]
  found = {}
  for sock in links:
    found[int(sock.recv(8))] = sock
  return found


def main(rank, hosts, port, options, patch):
  links = connect(rank, len(hosts), port)
  if rank:
    links[0].sendall(f"{rank:8}".encode())
  for sock in links.values():
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  exec(patch, {"rank": rank})
  began = time.monotonic()
  group = make_group(rank, hosts, links)
  options = preflight.parse(options)
  findings = preflight.run(group, options)
  seconds = time.monotonic() - began
  print(json.dumps([findings, seconds, "jax" in sys.modules]), flush=True)
  os._exit(0)


if __name__ == "__main__":
  main(**json.loads(sys.argv[1]))
