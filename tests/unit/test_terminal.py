"""Progress on terminals: of any width, of a launcher, and of a job."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

from jaxscale import cluster, metrics
from jaxscale.experiment import build
from jaxscale.metrics.log import LineHandler
from jaxscale.run.reporter import Reporter
from support.configs import tiny_digits
from support.paths import ROOT

SHOWS = """
import sys, time
from jaxscale.metrics import Progress
progress = Progress(123456, total_examples=10**6, plain="plain" in sys.argv)
perf = {"examples_per_s": progress.rate(1000), "step_s": 0.1}
progress.train(1234, {"loss": 1.0, "learning_rate": 0.1}, perf)
time.sleep(0.3)
progress.close()
"""


def on_terminal(columns, *argv):
  """Return what a terminal of this width gets."""
  ours, theirs = pty.openpty()
  fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
  env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
  env |= {"TERM": "xterm", "PYTHONPATH": str(ROOT)}
  command = [sys.executable, "-c", SHOWS, *argv]
  process = subprocess.Popen(command, stdout=theirs, cwd=ROOT, env=env)
  os.close(theirs)
  text = b""
  try:
    while select.select([ours], [], [], 300)[0] and (more := os.read(ours, 4096)):
      text += more
  except OSError:  # EIO: the other end is closed
    pass
  os.close(ours)
  assert process.wait(300) == 0
  return text.decode()


def test_a_narrow_terminal_cuts_the_end_and_not_the_step():
  text = on_terminal(40)
  assert "step 1234/123456" in text and "…" in text


def test_a_pseudo_terminal_of_a_launcher_gets_plain_lines():
  text = on_terminal(80, "plain")
  assert re.fullmatch(r"step +1234/123456  loss 1.0000  lr 0.1 .*left\r\n", text)


def test_a_run_of_a_job_is_shown_in_plain_lines(monkeypatch, tmp_path):
  shown, real = {}, metrics.Progress

  def progress(*args, **options):
    shown.update(options)
    return real(*args, **options)

  monkeypatch.setattr(metrics, "Progress", progress)
  experiment = build.experiment(tiny_digits())
  for is_job in (False, True):
    monkeypatch.setattr(cluster, "is_job", lambda answer=is_job: answer)
    with Reporter(experiment, tmp_path, 0, lambda: True, LineHandler()):
      assert shown["plain"] is is_job
