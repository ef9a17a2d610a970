"""Code that Python imports at its start: it ends or holds a run at a step; see at_step.py."""

import os
import sys
import time


def install(number, activity, step, count):
  """Replace the functions that a run calls at every activity, and at the commit of a save."""
  from jaxscale.checkpoint.manager import Checkpoints
  from jaxscale.cluster.watch.watch import Watch

  real_at, real_commit, times = Watch.at, Checkpoints._commit, []

  def at(self, now, new):
    real_at(self, now, new)
    if (now, new) != (step, activity):
      return
    times.append(now)
    if len(times) != count:
      return
    os.kill(os.getpid(), number)
    # Signal handlers and all other threads, such as the writer of checkpoints, go on. A run
    # that is asked to stop trains this step and stops.
    while not self.stop._held and self.stop._decision is None:
      time.sleep(0.01)
      real_at(self, now, new)  # Else several processes are reported as hanging.

  def commit(self, save):
    while activity == "commit" and save.step >= step:
      time.sleep(1)
    real_commit(self, save)

  Watch.at, Checkpoints._commit = at, commit


class Finder:
  """Installer at the import of what trains: before that, jaxscale must not be imported."""

  def find_spec(self, name, path, target=None):
    if name == "jaxscale.run.fit":
      sys.meta_path.remove(self)
      number, activity, step, count = os.environ["AT_STEP"].split()
      install(int(number), activity, int(step), int(count))


sys.meta_path.insert(0, Finder())
