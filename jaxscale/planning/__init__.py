"""What a compiled program says of a step, a run and a job, before anything runs.

`topologies` has accelerators that need not be present, `fits` and `describe` are about
the step of a config. `plan` predicts its seconds, from the rates in `machine`, which
`calibrate` measures: `kernels` and `transfer` are the parts, `timeline` goes through
the schedule, `step_plan` scales it, `job` has the hours. `search` compares layouts in
the order of an `estimate`; `submission` makes a job of a plan. Nothing is trained.
`trace` reads the seconds of a run's trace.
"""
