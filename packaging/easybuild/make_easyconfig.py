"""Write the easyconfigs of jaxscale from uv.lock: `python make_easyconfig.py` with uv.

It makes uv.lock, which git ignores: that names the addresses of an index. Every package
is a component with the version and the checksum that are in it. Wheels are taken where
there are any: XLA needs hours and Bazel to compile. A site that compiles JAX itself
(`jax` of EasyBuild) drops jax and jaxlib from the list and names its module in
`dependencies`.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# pyproject.toml reads it from there, too, so that uv.lock has none.
INIT = (ROOT / "jaxscale/__init__.py").read_text()
VERSION = re.findall(r'^__version__ = "(.+)"$', INIT, re.M)[0]
# EasyBuild's toolchain 2025b, easybuild-easyconfigs 5.
TOOLCHAIN, PYTHON, TAG = ("GCCcore", "14.3.0"), "3.13.5", "313"
# Machine and wheels; EasyBuild's Python knows no musl, nor free threading.
FITS = re.compile(
  rf"-(py3|py2\.py3|cp{TAG})-none-any|-cp{TAG}-cp{TAG}-manylinux\S*x86_64"
  r"|-cp3\d+-abi3-manylinux\S*x86_64|-py3-none-manylinux\S*x86_64"
)
# What is imported where it has another name than the package; False: nothing.
IMPORTS = {
  "absl-py": "absl",
  "attrs": "attr",
  "dm-tree": "tree",
  "fonttools": "fontTools",
  "markdown-it-py": "markdown_it",
  "googleapis-common-protos": False,
  "opencv-python-headless": "cv2",
  "orbax-checkpoint": "orbax.checkpoint",
  "pillow": "PIL",
  "pyyaml": "yaml",
  "protobuf": "google.protobuf",
  "python-dateutil": "dateutil",
}
# EasyBuild has an easyblock of this name, which compiles; a wheel is only unpacked.
COMPILED = "jaxlib", "numpy", "scipy"
HEADER = '''\
# Made by packaging/easybuild/make_easyconfig.py from uv.lock: change that, not this.
# jaxscale's own wheel (`python -m hatchling build`) goes into EasyBuild's source path.
easyblock = 'PythonBundle'

name = 'jaxscale'
version = '{version}'
{suffix}
homepage = 'https://docs.jax.dev'  # of JAX: jaxscale has no address of its own yet
description = """Trains neural networks at very large batch on HPC clusters, in JAX."""

toolchain = {{'name': '{toolchain[0]}', 'version': '{toolchain[1]}'}}

dependencies = [
    ('Python', '{python}'),
]

exts_list = [
'''
FOOTER = """\
]

sanity_check_paths = {
    'files': ['bin/jaxscale'],
    'dirs': ['lib/python%(pyshortver)s/site-packages/jaxscale'],
}
sanity_check_commands = ['jaxscale --version']

moduleclass = 'ai'
"""


def wanted(extra: str | None) -> list[str]:
  """Names of the packages on Linux and x86_64, as uv resolves them for this Python."""
  command = ["uv", "export", "--frozen", "--quiet", "--no-hashes", "--no-header"]
  command += ["--no-annotate", "--no-emit-project", "--project", str(ROOT)]
  command += ["--extra", extra] if extra else []
  lines = subprocess.check_output(command, text=True).splitlines()
  other = r"< '3\.12'|== 'win32'|== 'darwin'|(machine|system) == '(arm64|aarch64)'"
  return [line.partition(" ;")[0].strip() for line in lines if not re.search(other, line)]


def component(name: str, file: str, digest: str, version: str) -> str:
  """One line of `exts_list`."""
  options = f"'source_tmpl': '{file}', 'checksums': ['{digest}']"
  module = False if name.startswith(("nvidia-", "jax-cuda")) else IMPORTS.get(name)
  if module is not None:
    options += f", 'modulename': {module!r}"
  if name in COMPILED:
    options += ", 'easyblock': 'PythonPackage'"
  return f"    ('{name}', '{version}', {{{options}}}),\n"


def source(package: dict) -> tuple[str, str]:
  """File and SHA-256 of a package of uv.lock: a wheel that fits, or the sdist.

  As pip does, it prefers a compiled wheel, and of those the one for the newest glibc.
  """
  wheels = [w for w in package.get("wheels", ()) if FITS.search(w["url"])]
  chosen = max(wheels, key=_preference) if wheels else package["sdist"]
  return chosen["url"].rpartition("/")[2], chosen["hash"].removeprefix("sha256:")


def _preference(wheel: dict) -> tuple:
  name = wheel["url"].rpartition("/")[2]
  glibc = max(map(int, re.findall(r"manylinux_2_(\d+)_", name)), default=0)
  return f"-cp{TAG}-cp{TAG}-" in name, "-abi3-" in name, glibc, -len(name)


def easyconfig(lock: dict, extra: str | None) -> str:
  """Return the text of an easyconfig."""
  packages = {f"{p['name']}=={p.get('version')}": p for p in lock["package"]}
  suffix = f"versionsuffix = '-{extra}'\n" if extra else ""
  text = HEADER.format(version=VERSION, suffix=suffix, toolchain=TOOLCHAIN, python=PYTHON)
  for key in wanted(extra):
    package = packages[key]
    text += component(package["name"], *source(package), package["version"])
  wheel = "%(name)s-%(version)s-py3-none-any.whl"
  return text + f"    ('jaxscale', version, {{'source_tmpl': '{wheel}'}}),\n" + FOOTER


def main() -> None:
  """Write one for processors, one with NVIDIA's wheels of CUDA."""
  subprocess.check_call(["uv", "lock", "--quiet", "--project", str(ROOT)])
  lock = tomllib.loads((ROOT / "uv.lock").read_text())
  for extra in (None, "cuda12"):
    suffix = f"-{extra}" if extra else ""
    name = f"jaxscale-{VERSION}-{'-'.join(TOOLCHAIN)}{suffix}.eb"
    (HERE / name).write_text(easyconfig(lock, extra))


if __name__ == "__main__":
  main()
