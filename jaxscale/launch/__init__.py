"""Runs on a cluster: submitted, watched, swept, resumed, by one command each.

    python -m jaxscale.launch submit --config configs/digits.py --nodes 4

From a notebook the same by functions, which return handles:

    from jaxscale import launch
    job = launch.submit("configs/digits.py", nodes=4, time="1:00:00")
    job.status(), job.wait(), job.metrics(), job.logs(), job.cancel()
    launch.job(job.name)                    # the same, in another session
    launch.sweep("configs/digits.py", [{"seed": 0}, {"seed": 1}])
    launch.scaling("configs/digits.py", [1, 2, 4]).report()

Nothing here imports JAX: a login node has no device, and an answer takes no second.
"""

from jaxscale.launch.handle import Job, job, submit, sweep
from jaxscale.launch.studies import Study, scaling, study

__all__ = ["Job", "Study", "job", "scaling", "study", "submit", "sweep"]
