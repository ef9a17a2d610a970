"""What a compiled program says of memory, bytes and seconds, before anything runs.

`hlo` reads the collectives, `cost` estimates compute, `topologies` has accelerators
that are not here, `fits` and `describe` are about the step of a config. `plan` predicts
its seconds, from the rates in `machine`: `kernels` and `transfer` are the parts,
`timeline` goes through the schedule, `step_plan` scales it, `job` has the hours.
`search` compares layouts (`candidates`), ordered by arithmetic (`estimate`) and ranked
by a `goal`. Nothing is trained.
"""
