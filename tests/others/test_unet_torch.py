"""U-Net in 2-D and 3-D, against one of PyTorch's layers with the same parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import config as cfg
from jaxscale.data import DatasetInfo

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

FEATURES, OUTPUTS = (8, 16, 24), 2
SHAPES = {"2-D": (20, 28, 3), "3-D": (8, 12, 16, 1)}


class Level(nn.Module):
  def __init__(self, dims, width_in, width, groups, padding_mode):
    super().__init__()
    conv = {2: nn.Conv2d, 3: nn.Conv3d}[dims]
    norm = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims]
    layers = []
    for first in (width_in, width):
      layers.append(conv(first, width, 3, padding=1, bias=False, padding_mode=padding_mode))
      layers += [nn.GroupNorm(groups, width, eps=1e-6) if groups else norm(width), nn.ReLU()]
    self.layers = nn.Sequential(*layers)

  def forward(self, x):
    return self.layers(x)


class UNet(nn.Module):
  """Ronneberger et al. (2015), figure 1, with same padding and norms."""

  def __init__(self, dims, channels, groups, padding_mode="zeros"):
    super().__init__()
    up = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]
    self.pool = {2: F.max_pool2d, 3: F.max_pool3d}[dims]
    pairs = list(zip((channels, *FEATURES), FEATURES, strict=False))
    self.down = nn.ModuleList([Level(dims, a, b, groups, padding_mode) for a, b in pairs])
    steps = list(zip(FEATURES[:0:-1], FEATURES[-2::-1], strict=True))
    self.up = nn.ModuleList([up(a, b, 2, stride=2, bias=False) for a, b in steps])
    self.join = nn.ModuleList([Level(dims, 2 * b, b, groups, padding_mode) for _, b in steps])
    self.last = {2: nn.Conv2d, 3: nn.Conv3d}[dims](FEATURES[0], OUTPUTS, 1)

  def forward(self, x):
    kept = []
    for i, level in enumerate(self.down):
      x = level(self.pool(x, 2) if i else x)
      kept.append(x)
    kept.pop()
    for up, join in zip(self.up, self.join, strict=True):
      x = join(torch.cat([kept.pop(), up(x)], dim=1))
    return self.last(x)


def stirred(net):
  """Give every parameter and running statistic a value that matters."""
  draw = torch.Generator().manual_seed(0)
  for name, x in net.state_dict().items():
    if name.endswith("running_var"):
      x.uniform_(0.5, 2.0, generator=draw)
    elif x.dtype.is_floating_point:
      deviation = x[0].numel() ** -0.5 if x.ndim > 1 else 0.3
      x.normal_(1.0 if x.ndim == 1 and "weight" in name else 0.0, deviation, generator=draw)
  return net.eval()


def of_torch(net, dims, groups):
  """Return the parameters and the state of our model."""
  params, stats, convs, norms = {}, {}, 0, 0
  levels = [*net.down, *net.join]
  for module in (layer for level in levels for layer in level.layers):
    if hasattr(module, "kernel_size"):
      kernel = module.weight.permute(*range(2, 2 + dims), 1, 0)
      params[f"Conv_{convs}"] = {"kernel": kernel}
      convs += 1
    elif hasattr(module, "weight"):
      own = {"scale": module.weight, "bias": module.bias}
      name = f"GroupNorm_{norms}" if groups else f"BatchNorm_{norms}"
      params[name] = own if groups else {"bn": own}
      if not groups:
        stats[name] = {"bn": {"mean": module.running_mean, "var": module.running_var}}
      norms += 1
  for i, up in enumerate(net.up):  # [in, out, 2, 2] -> [in, 2 * 2 * out]
    kernel = up.weight.permute(0, *range(2, 2 + dims), 1)
    params[f"Dense_{i}"] = {"kernel": kernel.reshape(len(kernel), -1)}
  last = net.last.weight.reshape(OUTPUTS, -1).T
  params[f"Dense_{len(net.up)}"] = {"kernel": last, "bias": net.last.bias}
  return jax.tree.map(lambda x: jnp.array(x.detach().numpy()), (params, {"batch_stats": stats}))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", ["group", "batch", "periodic"])
def test_the_same_outputs_and_gradients(kind, shape):
  dims, groups = len(shape) - 1, 0 if kind == "batch" else 4
  mode = "circular" if kind == "periodic" else "zeros"
  net = stirred(UNet(dims, shape[-1], groups, mode))
  label = (*shape[:-1], OUTPUTS)
  info = DatasetInfo("fields", shape, dtype="float32", label_shape=label, label_dtype="float32")
  settings = cfg.UNet(features=FEATURES, groups=groups, periodic=kind == "periodic")
  module = settings.build(cfg.ModelContext(info, jnp.dtype("float32")))
  params, state = of_torch(net, dims, groups)
  if groups:
    state = {}
  rng = np.random.default_rng(0)
  x, seen = (rng.normal(size=(2, *s)).astype(np.float32) for s in (shape, label))

  def ours(params, x):
    return module.apply({"params": params, **state}, x, False)

  out = jax.jit(ours)(params, x)
  grads = jax.jit(jax.grad(lambda p, x: (ours(p, x) * seen).sum(), argnums=(0, 1)))(params, x)
  theirs_x = torch.from_numpy(x).movedim(-1, 1).requires_grad_()
  theirs = net(theirs_x)
  (theirs * torch.from_numpy(seen).movedim(-1, 1)).sum().backward()
  assert theirs.std() > 0.1
  found = np.asarray(theirs.movedim(1, -1).detach())
  np.testing.assert_allclose(out, found, rtol=0, atol=1e-5 * np.abs(found).max())
  wanted = np.asarray(theirs_x.grad.movedim(1, -1))
  np.testing.assert_allclose(grads[1], wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
  for parameter in net.parameters():
    parameter.data = parameter.grad
  wanted, _ = of_torch(net, dims, groups)
  assert jax.tree.structure(wanted) == jax.tree.structure(params)
  for (path, a), b in zip(
    jax.tree.leaves_with_path(grads[0]), jax.tree.leaves(wanted), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * float(jnp.abs(b).max()), err_msg=str(path))
