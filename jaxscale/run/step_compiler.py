"""Background compilation of train steps, ahead of their phase, and of replica checks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from jaxscale.experiment import build
from jaxscale.experiment.phases import Phase
from jaxscale.run.programs import Programs
from jaxscale.training import replica_check
from jaxscale.training.types import TrainStep

T = TypeVar("T")


class StepCompiler:
  """Background compiler; the main threads of all processes must make the same calls."""

  def __init__(self, programs: Programs):
    """Compile in the turns of `programs`, in which processes wait for each other."""
    self._turn = programs.turn
    self._steps: dict[Phase, tuple[build.Experiment, Future[TrainStep]]] = {}
    self._fingerprint: Future[replica_check.Fingerprint] | None = None

  def begin(self, experiment: build.Experiment, lowering: Future[Any] | None = None) -> None:
    """Start to compile the train step of an experiment's phase, unless it has started.

    Args:
      experiment: the experiment at the phase.
      lowering: the future of `Experiment.lower_train_step`, if it has started.
    """
    if (key := _key(experiment.phase)) not in self._steps:
      turn = self._turn()

      def compile_step():
        return experiment.compile_train_step(lowering and lowering.result(), turn)

      self._steps[key] = experiment, in_background(compile_step)

  def wait(self, experiment: build.Experiment) -> TrainStep:
    """Wait for the train step of the experiment's phase, and return it."""
    self.begin(experiment)
    return self._steps[_key(experiment.phase)][1].result()

  def experiment_at(self, phase: Phase) -> build.Experiment | None:
    """Return the experiment whose step is compiled for a phase; None if there is none."""
    return self._steps[_key(phase)][0] if _key(phase) in self._steps else None

  def forget_all_but(self, *phases: Phase) -> None:
    """Free the programs of other phases."""
    kept = {*map(_key, phases)}
    self._steps = {key: step for key, step in self._steps.items() if key in kept}

  def fingerprint(self, experiment: build.Experiment) -> Future[replica_check.Fingerprint]:
    """Return the program that hashes a state, compiled once."""
    if self._fingerprint is None:
      turn = self._turn()

      def compile_it():
        shared = replica_check.shared(experiment.abstract_state())
        lowered = replica_check.make_fingerprint(experiment.mesh, shared).lower(shared)
        with turn:
          return lowered.compile()

      self._fingerprint = in_background(compile_it)
    return self._fingerprint


def _key(phase: Phase) -> Phase:
  """Return a phase without what its program does not depend on, such as where it ends."""
  return phase._replace(stop=0, ordinal=0, is_decided=True)


def in_background(function: Callable[[], T]) -> Future[T]:
  """Start a function in a thread; return the future of its result."""
  pool = ThreadPoolExecutor(1)
  future = pool.submit(function)
  pool.shutdown(wait=False)
  return future
