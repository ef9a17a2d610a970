"""Every reader of texts and messages, given anything; see test_fuzz.py."""

import contextlib
import socket
import subprocess
import time
import unittest.mock
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import strategies as st

from jaxscale.cli import commands
from jaxscale.cluster import detect, launch, secret, wire
from jaxscale.cluster.environment import check_environment
from jaxscale.cluster.rendezvous import handshake
from jaxscale.cluster.rendezvous.client import _Go
from jaxscale.cluster.rendezvous.handshake import Hello
from jaxscale.cluster.schedulers import nodelist, slurm
from jaxscale.cluster.timeouts import Timeouts
from jaxscale.cluster.watch.monitor import Failure, FaultNotice, Heartbeat, Monitor
from jaxscale.cluster.watch.signals import StopRequest
from jaxscale.cluster.watch.watch import Watch
from jaxscale.config.loading import load_config, override
from jaxscale.errors import ConfigError, user_message
from jaxscale.jobs.preflight import software
from jaxscale.jobs.site import load_site, with_options
from jaxscale.jobs.slurm_executor import parse_line
from jaxscale.parallel import rules
from jaxscale.planning import topologies
from support import fuzzing, launches
from support.bad_files import HUGE
from support.fuzzed import fuzzed
from support.fuzzing import SPECIAL, changed, edited, one_line
from support.tables import assignments, words

limits = pytest.fixture(fuzzing.limits, autouse=True)
place = pytest.fixture(fuzzing.place, scope="module")
CONFIG = load_config("configs/digits.py")

FIELDS = ["optimizer", "optimizer.lr", "epochs", "model.hidden", "mesh.data", "seed", "x"]
PATHS = st.one_of(
  st.sampled_from(FIELDS),
  st.lists(st.sampled_from([*FIELDS, "", "lr", "None"]), max_size=4).map(".".join),
  st.text(max_size=8),
)
TEXTS = st.one_of(
  st.text(max_size=8),
  st.sampled_from([*SPECIAL, "(" * 500, "[" * 90, "1e400", "()"]),
  st.text("()[]{}1,.'e-_\\x0b", max_size=12),
)


@fuzzed(
  st.dictionaries(PATHS, TEXTS, min_size=1, max_size=3),
  examples=[
    *({name: "1"} for name in ("optimizer..lr", "optimizer.", "")),
    *({"epochs": "9" * 5000}, {"model.hidden": "(" * 100_000}),
    {"optimizer": "SGD", "optimizer.lr.x": "1"},
  ],
)
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_overrides(texts):
  with one_line():
    override(CONFIG, texts)


PROFILES = [p.read_bytes() for p in sorted(Path("launch/profiles").glob("*.toml"))]


@fuzzed(
  st.one_of(edited(PROFILES), st.binary(max_size=30)),
  st.sampled_from(["nodes", "mem", "gpus_per_node", "tasks_per_node", "time"]),
  TEXTS,
  examples=[
    (b"a=" + b"[" * 100_000, "mem", ""),
    (b"a=" + b"{a=" * 5000, "mem", ""),
    (b"gpus_per_node=" + HUGE, "gpus_per_node", "9" * 5000),
    (b"mem='\xff'", "mem", "\0"),
  ],
)
def test_profile(place, content, option, text):
  path = place / "site.toml"
  path.write_bytes(content)
  with one_line():
    load_site(str(path))
  with one_line():
    with_options(load_site("launch/profiles/cpu.toml"), {option: text})


LISTS = st.text("n0123456789[]-,x() ", max_size=40)


LONG = ["n[" + ",".join(["0-65535"] * 4000) + "]", "n[" + "0" * 4400 + "1-2]", "[" * 50_000]
LONG += ["n[1-" + "9" * 5000 + "]", "9" * 5000]


LONG += ["n[0-65535][0-65535]", "2(x300000000)", "²"]


@fuzzed(st.one_of(LISTS, st.text(max_size=8)), examples=LONG)
def test_node_lists_and_counts(text):
  with one_line():
    assert len(nodelist.expand(text)) <= nodelist.MOST_HOSTS
  with one_line():
    assert len(slurm.tasks_per_node(text)) <= nodelist.MOST_HOSTS
  with one_line():
    launch.number({"N": text}, "N")


# A launcher's variables stand together, or none of them is looked at.
ENVIRONMENT = {
  "JAXSCALE_": "COORDINATOR NUM_PROCESSES PROCESS_ID JOB",
  "SLURM_": "JOB_ID STEP_ID PROCID NTASKS NODEID LOCALID RESTART_COUNT STEP_NODELIST "
  "STEP_TASKS_PER_NODE TASKS_PER_NODE STEP_NUM_TASKS JOB_NODELIST DISTRIBUTION HOSTFILE "
  "GPUS_PER_TASK GPUS_ON_NODE NTASKS_PER_NODE",
  "OMPI_COMM_WORLD_": "RANK SIZE LOCAL_RANK LOCAL_SIZE",
  "PBS_": "NODEFILE JOBID",
  "TPU_": "WORKER_ID WORKER_HOSTNAMES",
  "MEGASCALE_": "NUM_SLICES SLICE_ID COORDINATOR_ADDRESS",
  "KUBERNETES_": "SERVICE_HOST",
  "": "JOB_COMPLETION_INDEX HOSTNAME COORDINATOR_ADDRESS PROCESS_ID NUM_PROCESSES "
  "COORDINATOR_PORT CUDA_VISIBLE_DEVICES JAX_LOCAL_DEVICE_IDS JAX_PLATFORMS JAX_NUM_CPU_DEVICES",
}
GROUPS = [[prefix + name for name in words(names)] for prefix, names in ENVIRONMENT.items()]
VALUES = ["0", "1", "2", "4", "2(x2)", "n[1-2]", "n1,n2", "n1:7000", "arbitrary", "cpu"]


def variables(chance):
  """Return an environment of one or several launchers."""
  names = chance.choice(GROUPS) + chance.choice(GROUPS) * chance.randrange(2)
  names = chance.sample(names, chance.randrange(len(names) // 2, len(names)) + 1)
  env = {name: chance.choice(VALUES) for name in names}
  for _ in range(chance.randrange(3)):
    letters = "".join(chance.choices("0123456789[]-,x()²: \x1bn", k=chance.randrange(9)))
    env[chance.choice(names)] = chance.choice([*SPECIAL, letters])
  return env


STEP = assignments(
  "SLURM_JOB_ID=7 SLURM_STEP_NODELIST=n[1-2] SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 "
  "SLURM_DISTRIBUTION=arbitrary SLURM_HOSTFILE=file"
)
MPI = assignments("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PBS_NODEFILE=file")


@fuzzed(
  fuzzing.by_chance(variables),
  fuzzing.edited([b"n1 slots=2\nn2\n"]),
  examples=[(STEP, b"\xff"), (MPI, b"\xff"), ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, b"")],
)
def test_environment(place, env, file):
  (place / "hosts").write_bytes(file)
  for name in ("SLURM_HOSTFILE", "PBS_NODEFILE"):
    if name in env:
      env = env | {name: str(place / "hosts")}
  with one_line():
    launched = launches.found(env, fqdn=lambda: "n1.x")
    detect.local_device_ids(env, detect.visible_gpus(env, device_root=place), launched)
  with one_line():
    check_environment(env)


SHOWN = (
  "JobId=7 JobName=x JobState=RUNNING Reason=None Dependency=(null) Restarts=1 "
  "EndTime=2026-03-01T12:00:00 Deadline=N/A NodeAddr=n1"
)
COLUMNS = ("7_1", "RUNNING", "4", "1:00", "0", "None", "5:00")
QUEUE = "".join(text.ljust(128) for text in COLUMNS)


@fuzzed(
  edited([SHOWN.encode()]),
  edited([QUEUE.encode()]),
  examples=[
    (SHOWN.replace("2026-03-01", "2026-19-41").encode(), b""),
    (SHOWN.replace("2026-03-01", "0000-03-01").encode(), b""),
  ],
)
def test_what_slurm_prints(shown, line):
  shown, line = (text.decode(errors="surrogateescape") for text in (shown, line))
  job = launch.Job("slurm", "7")
  with one_line(), unittest.mock.patch.object(slurm, "_scontrol", lambda *args: shown):
    slurm.queue_times({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
    slurm.end_time({"SLURM_JOB_ID": "7"})
    slurm._was_requeued(job), slurm.ending_state(job)
    assert parse_line(line)[1].nodes >= 0


GPUS = "0, GPU-1, H100, 550.1, 3, 81559, 0\n1, GPU-2, H100, 550.1, 3, 81559, 2"


ODD_GPUS = [GPUS.replace("81559", text).encode() for text in ("1.2.3", "9" * 400)]
ODD_GPUS += [GPUS.replace("81559, 2", "81559, ²").encode(), b"0, GPU-"]


@fuzzed(edited([GPUS.encode()]), examples=ODD_GPUS)
def test_what_nvidia_smi_prints(printed):
  text = printed.decode(errors="replace")
  done = subprocess.CompletedProcess([], 0, text)
  with one_line(), unittest.mock.patch.object(subprocess, "run", lambda *_, **__: done):
    assert all(gpu["total"] >= 0 for gpu in software.nvidia()[1])


OPTIONS = [
  (parser, action.option_strings[-1])
  for parser in (commands.load(name)[1] for name in commands.COMMANDS)
  for action in parser._actions
  if action.option_strings and action.nargs != 0
]


@fuzzed(
  st.sampled_from(OPTIONS),
  TEXTS,
  st.text("0123456789x,.-KMBe+v5h", max_size=8),
  examples=[
    (OPTIONS[0], "9" * 5000, "v5e-" + "9" * 5000),
    (OPTIONS[0], "", "9" * 400 + "xh100-8"),
    (OPTIONS[0], "", "h100-" + "8" * 4000),
    (next(o for o in OPTIONS if o[1] == "--json"), "(" * 500, ""),
    (OPTIONS[0], "", "v5e-٢"),
  ],
)
def test_command_lines(option, text, number):
  parser, flag = option
  for given_text in (text, number):
    with one_line():
      args = parser.read([f"{flag}={given_text}"])
      assert isinstance(args, Namespace)
  with one_line():
    groups, _, count = topologies._parse(number)
    assert groups * count < 10**12
  with one_line():
    rules.parse(text)


PEER = Hello(1, 2, "n2", 9, "p", "f", "10.0.0.2", {"jax": "1"}, {"code": "x"}, "", "0-7")
MADE = [PEER, Heartbeat(3, "step", 1, 0.5, 0.1, 3), Failure("x", 1, False, False, "in step 3")]
MADE += [_Go("7000", ["n1", "n2"], [[0, 1], [0, 1]]), StopRequest("SIGTERM")]
MADE += [FaultNotice("error: x", 1, True)]
KINDS = {type(message): message for message in MADE}


@fuzzed(st.sampled_from([*KINDS]), st.data())
def test_messages(kind, data):
  """Parse what a process of the run sends that is damaged, or runs other code."""
  values = data.draw(changed([*KINDS[kind]]))
  with one_line(ValueError):
    found = wire.parse(kind, values)
    assert all(t.isprintable() for t in found if isinstance(t, str))
    if kind is Hello:
      lines = handshake.find_mismatches({0: PEER, 1: found}, {1: "10.0.0.2"})
      assert all(user_message(ConfigError(line)).line.isprintable() for line in lines)


MESSAGES = [{"beat": [3, "step", 1, 0.5, 0.1, 3]}, {"ask": ["SIGTERM", "preemption"]}]
MESSAGES += [{"held": 17}, {"fail": ["x", 1, False, False, "in step 3"]}, {"bye": 3}, {"hold": 1}]
MESSAGES += [{"stop": [17, "SIGTERM", "preemption"]}]
ODD = [5, None, {"fail": "x"}, {"stop": []}, {"beat": [3, "nowhere", 1, -1e9, 1e300, 5]}]


@fuzzed(st.lists(changed(MESSAGES), max_size=3), examples=[[[message]] for message in ODD])
def test_messages_of_the_watch(lists):
  """To process 0, which names faults of what it has heard, and from it."""
  pairs = [socket.socketpair() for _ in range(2)]
  links = {rank: wire.Link(pair[0]) for rank, pair in enumerate(pairs)}
  monitor = Monitor(links, ["n1", "n2"], Timeouts(), log=lambda _: None)
  watch = Watch(1, ["n1", "n2"], wire.Link(pairs[1][1]), Timeouts(), None)
  for message in [m for messages in lists for m in messages]:
    with one_line(ValueError):
      monitor._handle(1, message, time.monotonic())
    if not (isinstance(message, dict) and {"fault", "bye"} & {*message}):  # they end it
      with one_line(ValueError):
        watch._handle(message)
  with one_line():
    for later in (0, 1e6):
      monitor._check(time.monotonic() + later)
    assert all(user_message(ConfigError(fault.cause)) for fault in monitor._faults)
  for end in sum(pairs, ()):
    end.close()
  monitor._selector.close()


def sent(*messages, keys=None):
  """Return the bytes of sealed messages."""
  here, there = map(wire.Link, socket.socketpair())
  here.keys = keys
  for message in messages:
    here.send(message)
  here.close()
  with contextlib.closing(there.sock) as sock:
    return sock.recv(1 << 16)


KEYS = wire.Keys(b"a", b"b")
BARE, SEALED = (sent({"a": [1, "b"]}, ["c"], 5, keys=keys) for keys in (None, KEYS))


ON_A_LINK = [(b"[" * 100_000 + b"\n", False), (HUGE + b"\n", False)]
ON_A_LINK += [(SEALED * 2, True), (b"\n" * 99, True)]


@fuzzed(edited([BARE, SEALED]), st.booleans(), examples=ON_A_LINK)
def test_what_comes_on_a_link(content, is_sealed):
  """With keys, nothing but the beginning of what was sent."""
  here, there = socket.socketpair()
  link, heard = wire.Link(there, max_bytes=1 << 16), []
  here.sendall(content)
  here.close()
  if is_sealed:
    link.seal(KEYS._replace(receive=KEYS.send))
  with contextlib.suppress(EOFError), one_line(ValueError):
    while True:
      heard += link.drain()
  link.close()
  assert not is_sealed or heard == [{"a": [1, "b"]}, ["c"], 5][: len(heard)]


@fuzzed(
  edited([b'"' + b"0" * 32 + b'"\n']),
  edited([SEALED]),
  st.booleans(),
  examples=[(b'"' + b"0" * 32 + b'"\n', b'"welcome"\n', False)],
)
def test_strangers(first, second, is_server):
  """A program without the key is never one of ours, whatever it says."""
  with socket.create_server(("127.0.0.1", 0)) as server:
    theirs = socket.create_connection(server.getsockname())
    ours = server.accept()[0]
  with theirs, ours, contextlib.suppress(EOFError, OSError), one_line(ValueError):
    theirs.sendall(first + second)
    theirs.shutdown(socket.SHUT_WR)
    if is_server:
      link = wire.Link(ours, max_bytes=secret.GREETING_BYTES)
      secret.welcome(link, b"key", link.next())
      assert link.next() is None
    else:
      secret.greet(ours, b"key", 5)
      raise AssertionError("a stranger was believed")


@fuzzed(edited([b"0f" * 32]))
def test_secret(place, content):
  path = place / ".jaxscale" / "secret"
  path.parent.mkdir(exist_ok=True)
  path.write_bytes(content)
  path.chmod(0o600)
  with one_line():
    assert len(secret.read_file(path)) == 32
