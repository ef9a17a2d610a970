"""Train one run in its workdir, from the first step to the summary.

`fit.fit(config, workdir)` trains. `run.Run` holds the state of a run, `train_phases` the
order of a run's work, `hooks` the work between steps, `callbacks` the user's part of it,
`reporter` the output, and `session` the start and the end of a process.
`generate` and `export` read the checkpoints of a run. This package does not know about
launchers or job schedulers. Names are imported on first access.
"""

from jaxscale import lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
