"""Runs on a cluster: submitted, watched, swept, resumed, by one command each.

    python -m jaxscale.launch submit --config configs/digits.py --nodes 4

From a notebook the same by functions:

    from jaxscale import launch
    job = launch.submit("configs/digits.py", nodes=4, time="1:00:00")
    job.status()
    job.wait()
    job.metrics()

Nothing here imports JAX: a login node has no device, and an answer takes no second.
"""

from jaxscale.launch.handle import Job, submit, submit_sweep

__all__ = ["Job", "submit", "submit_sweep"]
