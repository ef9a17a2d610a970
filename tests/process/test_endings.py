"""Ends of a command whose reader, terminal or user goes away."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.cases import all_slow_except
from support.commands import child_env, error_line, run_train
from support.paths import ROOT
from support.processes import line_of, wait_until
from support.tiny_runs import checkpoint_names, newest_step, start


def ended(process):
  """(exit code, stderr) of a process, which has to end."""
  _, error = process.communicate(timeout=200)
  return process.returncode, error


def test_a_closed_pipe_saves_as_sigterm_does(tmp_path):
  """`train | head -1`."""
  process = start(tmp_path / "run")
  assert process.stdout.readline()
  wait_until(lambda: newest_step(tmp_path / "run"), process)
  process.stdout.close()
  code, error = process.wait(200), process.stderr.read()
  process.stderr.close()
  assert code == 85, error
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert summary["outcome"] == "interrupted"
  step = summary["step"]
  assert str(step) in checkpoint_names(tmp_path / "run") and 0 < step < 225
  assert "standard output is closed: saving after this step" in error
  assert error.splitlines()[-1].startswith(f"saved step {step}; to resume: python -m")


@pytest.mark.slow
def test_a_closed_terminal_saves_as_sigterm_does(tmp_path):
  """SIGHUP, after which nothing can be printed any more."""
  process = start(tmp_path / "run")
  wait_until(lambda: newest_step(tmp_path / "run"), process)
  process.send_signal(signal.SIGHUP)
  process.stdout.close()
  process.stderr.close()
  assert process.wait(200) == 85
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert str(summary["step"]) in checkpoint_names(tmp_path / "run")


UP = """
import os, signal, sys, time
from jaxscale.cluster.watch.signals import SignalHandlers
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with SignalHandlers(grace_s=None) as handlers:
  handlers.attach(lambda request: print("asked", request, file=sys.stderr, flush=True))
  print("up", flush=True)
  for line in sys.stdin:
    print("more", flush=True)
print("end", flush=True)
"""


def test_nohup_stays_nohup(child):
  process = child(UP)
  assert line_of(process) == "up"
  process.send_signal(signal.SIGHUP)
  out, error = process.communicate("x\n", timeout=200)
  assert (process.returncode, out, error) == (0, "more\nend\n", "")


def test_a_full_disk_under_standard_output_costs_lines_alone(child):
  with open("/dev/full", "w") as full:
    code = f"import os; os.dup2({full.fileno()}, 1)"
    process = subprocess.Popen(
      [sys.executable, "-c", code + UP.rpartition("print")[0]],
      stdin=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=ROOT,
      pass_fds=[full.fileno()],
    )
    _, error = process.communicate("x\nx\n", timeout=200)
  why = "standard output: No space left on device; the run continues, lines are lost"
  assert error.startswith(f"{why}\n") and "asked" not in error


TINY = "--config.model=MLP --config.model.hidden=8, --config.epochs=3"
STREAMS = ["2>&-", ">&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full"]


@pytest.mark.parametrize("streams", all_slow_except(STREAMS, "2>&-"))
def test_closed_and_full_streams_cost_no_exit_code(streams, tmp_path):
  """Start programs as daemons do: done is 0, and a mistake 2."""
  for more, code in ((TINY, 0), ("--config.epochs=x", 2)):
    command = f"{sys.executable} -m jaxscale.train --config configs/digits.py {more}"
    script = f"{command} --workdir {tmp_path}/run {streams}"
    done = subprocess.run(
      ["bash", "-c", script], cwd=ROOT, env=child_env(), capture_output=True, text=True
    )
    assert done.returncode == code, done
  assert ("error: " in done.stderr) == ("2>" not in streams)


@pytest.mark.parametrize("streams", all_slow_except([">&- 2>&-", "2>/dev/full"], ">&- 2>&-"))
def test_asked_to_stop_without_streams_it_saves(streams, tmp_path):
  command = f"{sys.executable} -m jaxscale.train --config configs/digits.py {TINY}"
  command += f" --config.epochs=2000 --workdir {tmp_path}/run"
  process = subprocess.Popen(
    ["bash", "-c", f"exec {command} {streams}"],
    cwd=ROOT,
    env=child_env(),
    stdout=subprocess.DEVNULL,
  )
  while not newest_step(tmp_path / "run"):
    assert process.poll() is None
    time.sleep(0.05)
  process.terminate()
  assert process.wait(300) == 85


THREADS = """
import sys, threading, time
from jaxscale import errors
errors._THREADS_S = float(sys.argv[1])
def main(argv):
  threading.Thread(target={target}, name="uploads").start()
  return 85
errors.leave(main)
"""


def test_a_thread_of_a_config_does_not_keep_a_run_that_is_done(child):
  process = child(THREADS.format(target="threading.Event().wait"), "0.1")
  code, error = ended(process)
  line = "note: left while threads still ran (uploads); start them with daemon=True\n"
  assert (code, error) == (85, line)
  process = child(THREADS.format(target="lambda: time.sleep(0.1)"), "600")
  assert ended(process) == (85, "")


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["completion", "bash"]])
def test_a_full_disk_is_one_line(argv):
  with open("/dev/full", "w") as full:
    done = subprocess.run(
      [sys.executable, "-m", "jaxscale", *argv],
      cwd=ROOT,
      env=child_env(),
      stdout=full,
      stderr=subprocess.PIPE,
      text=True,
      timeout=200,
    )
  line = error_line(done, 1)
  assert "standard output: No space left" in line and "checkpoint" not in line


@pytest.mark.slow
@pytest.mark.parametrize(
  "argv",
  [
    ["describe", "--config=digits"],
    ["bench", "--mesh=1", "--sizes=1KB", "--rounds=1"],
    ["plot-schedule", "digits", "--out=x.png"],
  ],
  ids=lambda argv: argv[0],
)
def test_a_result_that_cannot_be_printed_fails_its_command(argv, tmp_path):
  """Not as a run does, whose results are files: it ended with 0, or blamed --out."""
  command = [sys.executable, "-m", "jaxscale", *argv]
  options = {"cwd": tmp_path, "env": child_env(PYTHONPATH=str(ROOT)), "text": True}
  with open("/dev/full", "w") as full:
    done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=300, **options)
  assert "error: standard output: No space left on" in error_line(done, 1)
  reading, writing = os.pipe()
  os.close(reading)
  with open(writing, "w") as closed:
    done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=300, **options)
  assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_has_enough_is_no_fault():
  done = subprocess.run(
    f"{sys.executable} -m jaxscale train --help | head -1; echo ${{PIPESTATUS[0]}}",
    shell=True,
    executable="/bin/bash",
    cwd=ROOT,
    env=child_env(),
    capture_output=True,
    text=True,
    timeout=200,
  )
  assert done.stdout.splitlines()[-1] == "0" and not done.stderr


# The main thread never comes back to Python, as in a compilation.
LEAVES = """
import ctypes, os, sys, time
from jaxscale.errors import leave
def main(argv):
  try:
    print("up", flush=True)
    {wait}
  finally:
    print("cleaned", flush=True)
leave(main)
"""
IN_CPP = """
    lock = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(lock)
    ctypes.CDLL(None).pthread_mutex_lock(lock)
"""
# As JAX's, in which Python prints a KeyboardInterrupt and goes ahead.
IN_GARBAGE = """
    import gc
    gc.callbacks.append(lambda *_: time.sleep(100))
    gc.collect()
"""
WAITS = {"py": ("time.sleep(100)", "cleaned\n"), "c++": (IN_CPP, ""), "garbage": (IN_GARBAGE, "")}


@pytest.mark.parametrize("wait, printed", WAITS.values(), ids=[*WAITS])
def test_ctrl_c_is_one_line_wherever_the_main_thread_is(child, wait, printed):
  process = child(LEAVES.format(wait=wait.strip()))
  assert line_of(process) == "up"
  time.sleep(0.3)  # the way from that line to the wait
  process.send_signal(signal.SIGINT)
  out, error = process.communicate(timeout=200)
  assert (process.returncode, out, error) == (130, printed, "\nerror: Ctrl-C\n")


FAILS = """
import time
from concurrent.futures import ThreadPoolExecutor
from jaxscale.errors import ConfigError, leave
def main(argv):
  ThreadPoolExecutor(1).submit(time.sleep, 100)
  raise ConfigError("a.b=c: give d")
leave(main)
"""


def test_an_error_does_not_wait_for_what_compiles_in_the_background(child):
  """`init_from` of a file that is not there: the line came 30 s before the end."""
  process = child(FAILS)
  out, error = process.communicate(timeout=200)
  assert (process.returncode, out, error) == (2, "", "error: a.b=c: give d\n")


@pytest.mark.parametrize("moment", ["import", "compilation"])
def test_ctrl_c_before_the_first_step_waits_for_nothing(tmp_path, moment):
  process = start(tmp_path / "run")
  if moment == "compilation":
    assert process.stdout.readline().startswith("jaxscale ")
  else:
    maps = Path(f"/proc/{process.pid}/maps")
    wait_until(lambda: "jaxlib" in maps.read_text(), process)
  process.send_signal(signal.SIGINT)
  code, error = ended(process)
  assert code == 130, error
  assert error.strip().startswith("error: Ctrl-C") and error.strip().count("\n") == 0


WRONG = {
  "JAX_PLATFORMS": ("foo", "no such platform; give one of cpu, "),
  "JAX_NUM_CPU_DEVICES": ("0", "give a whole number >= 1"),
  "JAX_DISABLE_JIT": ("1", "unset it"),
  "JAX_ENABLE_X64": ("maybe", "invalid truth value 'maybe'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_variable_of_jax_is_checked(tmp_path, name):
  value, remedy = WRONG[name]
  done = run_train(tmp_path / "run", **{name: value})
  line = error_line(done, 2)
  assert name in line and remedy in line


def test_the_doctor_names_the_variable(tmp_path):
  done = subprocess.run(
    [sys.executable, "-m", "jaxscale", "doctor", "--workdir", str(tmp_path), "--skip=network,disk"],
    env=child_env(JAX_PLATFORMS="foo"),
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 2, done.stderr
  assert "JAX_PLATFORMS=foo: no such platform" in done.stdout
  assert "AssertionError" not in done.stdout and not done.stderr


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_an_ascii_terminal_gets_help_and_a_refusal_of_other_names(tmp_path):
  command = [sys.executable, "-m", "jaxscale", "train"]
  options = {"cwd": ROOT, "env": child_env(**ASCII), "capture_output": True}
  done = subprocess.run([*command, "--help"], timeout=200, **options)
  assert done.returncode == 0 and b"--config.epochs" in done.stdout, done.stderr
  workdir = os.fsencode(tmp_path) + b"/w\xc3\xbc"
  command += ["--config=digits", "--workdir"]
  done = subprocess.run([*command, workdir], timeout=200, **options)
  assert done.returncode == 2 and done.stderr.startswith(b"error: --workdir=")
  assert b"LC_ALL=C.UTF-8" in done.stderr and not os.path.exists(workdir)
  command = [*command[:-3], "submit", "--config=digits", "--runs", workdir]
  done = subprocess.run(command, timeout=200, **options)
  assert done.returncode == 2 and done.stderr.startswith(b"error: --runs=")


def test_a_backend_that_matplotlib_does_not_know_does_not_matter(tmp_path):
  code = (
    "from jaxscale.metrics import plot\n"
    "with plot.figure('a.png', 1, 1, (1, 1)) as axes: axes[0, 0].plot([1, 2])"
  )
  env = child_env(MPLBACKEND="foo", PYTHONPATH=str(ROOT))
  done = subprocess.run(
    [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"


def test_without_the_packages_there_is_one_line():
  """A Python of the system: `python3 -m jaxscale.train`."""
  done = subprocess.run(
    [sys.executable, "-S", "-m", "jaxscale.train", "--help"],
    cwd=ROOT,
    env=child_env(),
    capture_output=True,
    text=True,
    timeout=200,
  )
  assert "make env" in error_line(done, 2)


def test_a_package_that_is_missing_is_named(tmp_path):
  (tmp_path / "jax").mkdir()
  (tmp_path / "jax" / "__init__.py").write_text("import no_such_library")
  done = run_train(tmp_path / "run", PYTHONPATH=str(tmp_path))
  line = error_line(done, 2)
  assert line.startswith("error: no_such_library is not installed for ")


HOMELESS = """
import os, pwd, sys

def nobody(uid):
  raise KeyError(f"getpwuid(): uid not found: {uid}")

pwd.getpwuid = nobody
for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR"):
  os.environ.pop(name, None)
from jaxscale import cli
from jaxscale.data.dataset import user_cache

code = cli.main(sys.argv[1:])
assert user_cache().is_dir() and user_cache() == user_cache()
sys.exit(code)
"""


OF_TEXT = """
from jaxscale import config as c

def get_config():
  return c.Config(
    model=c.Transformer(num_layers=1, width=16, num_heads=2, hidden=8),
    data=c.TextFiles(path=".", sequence_length=8), optimizer=c.SGD(lr=0.1),
    batch_size=16, epochs=0.5,
  )
"""


@pytest.mark.parametrize("config", ["digits", "of_text.py"])
def test_a_user_without_a_home_trains_with_one_note(config, tmp_path):
  """In a container whose user has no passwd entry: 20 lines of traceback."""
  (tmp_path / "of_text.py").write_text(OF_TEXT)
  for name in ("train", "val"):
    (tmp_path / f"{name}.txt").write_text("some text " * 100)
  env = child_env(PYTHONPATH=str(ROOT))
  env.pop("JAX_COMPILATION_CACHE_DIR", None)
  argv = ["train", f"--config={config}", "--workdir=run"]
  argv += ["--config.epochs=3", "--config.model=MLP"] * (config == "digits")
  done = subprocess.run(
    [sys.executable, "-c", HOMELESS, *argv],
    cwd=tmp_path,
    env=env,
    timeout=200,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr.count("note: no home directory, caches are in ") == 1
  assert "Traceback" not in done.stderr and not (tmp_path / "~").exists()
