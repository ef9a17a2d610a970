"""Ends of a command whose reader, terminal or user goes away."""

import json
import signal
import sys
from pathlib import Path

import pytest

from support.cases import all_slow_except
from support.commands import child_env, error_line, jaxscale, run, run_python, run_train
from support.paths import ROOT
from support.processes import killed_at_end, line_of, popen, wait_until
from support.tiny_runs import ENDLESS, checkpoint_names, newest_step, start


def ended(process):
  """(exit code, stderr) of a process, which has to end."""
  _, error = process.communicate(timeout=200)
  return process.returncode, error


@pytest.fixture
def saved(tmp_path):
  """Return (process, workdir) of a run that has saved a checkpoint and would not end."""
  with killed_at_end(start(tmp_path / "run", ENDLESS)) as process:
    assert process.stdout.readline()
    wait_until(lambda: newest_step(tmp_path / "run"), process)
    yield process, tmp_path / "run"


def test_a_closed_pipe_saves_as_sigterm_does(saved):
  """`train | head -1`."""
  process, workdir = saved
  process.stdout.close()
  code, error = process.wait(200), process.stderr.read()
  assert code == 85, error
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["outcome"] == "interrupted"
  step = summary["step"]
  assert str(step) in checkpoint_names(workdir)
  assert "standard output is closed: saving after this step" in error
  assert error.splitlines()[-1].startswith(f"saved step {step}; to resume: python -m")


@pytest.mark.slow
def test_a_closed_terminal_saves_as_sigterm_does(saved):
  """SIGHUP, after which nothing can be printed any more."""
  process, workdir = saved
  process.send_signal(signal.SIGHUP)
  process.stdout.close()
  process.stderr.close()
  assert process.wait(200) == 85
  summary = json.loads((workdir / "summary.json").read_text())
  assert str(summary["step"]) in checkpoint_names(workdir)


UP = """
import contextlib, os, signal, sys, time
from jaxscale.cluster.watch.signals import SignalHandlers
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with contextlib.closing(SignalHandlers(grace_s=None)) as handlers:
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
  full = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
  process = child(full + UP.rpartition("print")[0])
  _, error = process.communicate("x\nx\n", timeout=200)
  why = "standard output: No space left on device; the run continues without these lines"
  assert error.startswith(f"{why}\n") and "asked" not in error


TINY = "--config.model=MLP --config.model.hidden=8, --config.epochs=3"
STREAMS = ["2>&-", ">&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full"]


@pytest.mark.parametrize("streams", all_slow_except(STREAMS, "2>&-"))
def test_closed_and_full_streams_cost_no_exit_code(streams, tmp_path):
  """Start programs as daemons do: done is 0, and a mistake 2."""
  for more, code in ((TINY, 0), ("--config.epochs=x", 2)):
    command = f"{sys.executable} -m jaxscale.train --config configs/digits.py {more}"
    done = run("bash", "-c", f"{command} --workdir {tmp_path}/run {streams}")
    assert done.returncode == code, done
  assert ("error: " in done.stderr) == ("2>" not in streams)


@pytest.mark.parametrize("streams", all_slow_except([">&- 2>&-", "2>/dev/full"], ">&- 2>&-"))
def test_asked_to_stop_without_streams_it_saves(streams, tmp_path):
  command = f"{sys.executable} -m jaxscale.train --config configs/digits.py {TINY}"
  command += f" {ENDLESS} --workdir {tmp_path}/run"
  with killed_at_end(popen("bash", "-c", f"exec {command} {streams}", env=child_env())) as process:
    wait_until(lambda: newest_step(tmp_path / "run"), process, 300)
    process.terminate()
    assert ended(process)[0] == 85


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
  line = "note: exited while threads were running (uploads); start them with daemon=True\n"
  assert (code, error) == (85, line)
  process = child(THREADS.format(target="lambda: time.sleep(0.1)"), "600")
  assert ended(process) == (85, "")


def piped(words, into, cwd=ROOT):
  """Run a command of ours with its output into something of the shell's."""
  command = f"set -o pipefail; {sys.executable} -m jaxscale {words} {into}"
  return run("bash", "-c", command, cwd=cwd, PYTHONPATH=str(ROOT))


@pytest.mark.parametrize("words", ["--help", "train --help", "--version"])
def test_a_full_disk_is_one_line(words):
  line = error_line(piped(words, ">/dev/full"), 1)
  assert "standard output: No space left" in line and "checkpoint" not in line


PRINT = ["describe --config=digits", "bench --mesh=1 --sizes=1KB --rounds=1"]


@pytest.mark.slow
@pytest.mark.parametrize("words", PRINT)
def test_a_result_that_cannot_be_printed_fails_its_command(words, tmp_path):
  """Not as a run does, whose results are files: it ended with 0, or blamed --out."""
  line = error_line(piped(words, ">/dev/full", tmp_path), 1)
  assert "error: standard output: No space left on" in line
  done = piped(words, "| :", tmp_path)  # whose reader is gone
  assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_has_enough_is_no_fault():
  done = piped("train --help", "| head -1")
  assert done.returncode == 0 and done.stdout.count("\n") == 1 and not done.stderr


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
  stat = Path(f"/proc/{process.pid}/stat")  # of the main thread, which is to sleep in the wait
  wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", process)
  process.send_signal(signal.SIGINT)
  out, error = process.communicate(timeout=200)
  assert (process.returncode, out, error) == (130, printed, "\ninterrupted\n")


TWICE = """
import os, signal, sys
from jaxscale.errors import leave
class Slow:
  encoding = "utf-8"
  def flush(self):
    os.kill(os.getpid(), signal.SIGINT)
sys.stdout = Slow()
def main(argv):
  os.kill(os.getpid(), signal.SIGINT)
leave(main)
"""


def test_a_second_ctrl_c_during_the_clean_up_is_one_line(child):
  process = child(TWICE)
  _, error = process.communicate(timeout=200)
  assert (process.returncode, error) == (130, "\ninterrupted\n")


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
  assert error.strip() in ("interrupted", "error: Ctrl-C before any step was done; nothing to save")


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
  done = jaxscale("doctor", "--workdir", tmp_path, "--skip=disk", JAX_PLATFORMS="foo")
  assert done.returncode == 2, done.stderr
  assert "JAX_PLATFORMS=foo: no such platform" in done.stdout
  assert "AssertionError" not in done.stdout and not done.stderr


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_an_ascii_terminal_gets_help_and_a_refusal_of_other_names(tmp_path):
  done = jaxscale("train", "--help", **ASCII)
  assert done.returncode == 0 and "--config.epochs" in done.stdout, done.stderr
  workdir = tmp_path / "wü"
  done = jaxscale("train", "--config=digits", "--workdir", workdir, **ASCII)
  assert done.returncode == 2 and done.stderr.startswith("error: --workdir=")
  assert "LC_ALL=C.UTF-8" in done.stderr and not workdir.exists()
  done = jaxscale("submit", "--config=digits", "--runs", workdir, **ASCII)
  assert done.returncode == 2 and done.stderr.startswith("error: --runs=")


def test_a_backend_that_matplotlib_does_not_know_does_not_matter(tmp_path):
  code = (
    "from jaxscale.metrics import plot\n"
    "with plot.figure('a.png', 1, 1, (1, 1)) as axes: axes[0, 0].plot([1, 2])"
  )
  done = run_python("-c", code, cwd=tmp_path, MPLBACKEND="foo", PYTHONPATH=str(ROOT))
  assert done.returncode == 0, done.stderr
  assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"


def test_without_the_packages_there_is_one_line():
  """A Python of the system: `python3 -m jaxscale.train`."""
  assert "make env" in error_line(run_python("-S", "-m", "jaxscale.train", "--help"), 2)


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
from jaxscale.data.caches import user_cache

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
    batch_size=16, epochs=0.5, log=c.Log(plot=False),
  )
"""


@pytest.mark.parametrize("config", ["digits", "of_text.py"])
def test_a_user_without_a_home_trains_with_one_note(config, tmp_path, monkeypatch):
  """In a container whose user has no passwd entry: 20 lines of traceback."""
  (tmp_path / "of_text.py").write_text(OF_TEXT)
  for name in ("train", "val"):
    (tmp_path / f"{name}.txt").write_text("some text " * 100)
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
  argv = ["train", f"--config={config}", "--workdir=run"]
  argv += ["--config.epochs=3", "--config.model=MLP"] * (config == "digits")
  done = run_python("-c", HOMELESS, *argv, cwd=tmp_path, PYTHONPATH=str(ROOT))
  assert done.returncode == 0, done.stderr
  assert done.stderr.count("note: no home directory, so caches are in ") == 1
  assert "Traceback" not in done.stderr and not (tmp_path / "~").exists()
