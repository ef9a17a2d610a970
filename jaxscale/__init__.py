"""jaxscale: train neural networks at very large batch on HPC clusters.

    import jaxscale as jxs
    config = jxs.Config(model=jxs.models.MLP(), data=jxs.data.Digits(), ...)
    jxs.fit(config, "runs/digits")

The names of `__init__.pyi` are the public ones. Each is imported when it is first asked
for, so that `--help`, or a typo in a config, is answered without waiting for JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
