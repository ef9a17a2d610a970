"""Jobs on a cluster or in the background of this machine: submit, watch, resume.

    from jaxscale import jobs
    job = jobs.submit("configs/digits.py", nodes=4, time="1:00:00")
    job.status(), job.wait(), job.metrics(), job.logs(), job.cancel()
    jobs.job(job.name)                    # the same job, in a later session
    jobs.sweep("configs/digits.py", [{"seed": 0}, {"seed": 1}])
    jobs.scaling("configs/digits.py", [1, 2, 4]).report()

`executors` is the interface to Slurm and to other schedulers. This package does not import
JAX, so it works on login nodes without devices and answers within a second.
"""

from jaxscale.jobs.job_handle import Job, job, submit, sweep
from jaxscale.jobs.scaling_study import Study, scaling, study

__all__ = ["Job", "Study", "job", "scaling", "study", "submit", "sweep"]
