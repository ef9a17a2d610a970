"""Predict memory, step time and cost of a step, a run and a job from the compiled program.

`topologies` defines accelerators that need not be present; `fits` and `describe` compile the
step of a config. `plan` predicts its time from the rates in `machine`: `kernels` and `transfer`
model the parts, `timeline` follows the schedule, `step_plan` scales to other sizes, and `job`
computes hours. `search` compares layouts in the order of an `estimate`; `submission` turns a
plan into a job. Nothing is trained.
"""
