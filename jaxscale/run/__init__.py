"""One run, from its first step to its last, in a workdir of its own.

`fit.fit(config, workdir)` trains; `run.Run` decides, `train_phases` has the order of
things, `hooks` what happens between steps, `reporter` what is shown, `session` the
processes' start and end.
`generate` and `export` use what a run has saved. No launcher and no scheduler of jobs
is known here.
"""
