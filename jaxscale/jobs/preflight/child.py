"""Functions that need JAX, each run in a child process of the preflight.

XLA ends a process that has a flag it does not know, and JAX keeps an accelerator for
as long as its process lives. A child process calls one function, which returns what
JSON can hold, and prints the result as its last line.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from typing import Any

from jaxscale.cluster.environment import check_environment
from jaxscale.errors import ConfigError

WAIT_S = 90.0  # JAX's import from a cold parallel file system takes long
_XLA_ERRORS = {
  r"Unknown flags? in XLA_FLAGS: (.*)": r"XLA_FLAGS: this jax does not know \1",
  r"Couldn't interpret value (\S*) for flag (\S+?)\.?$": r"XLA_FLAGS: no value of --\2: \1",
  r'Could not open file "(.*?)" to read flags': r"XLA_FLAGS=\1: not a file; flags begin with --",
}


def ask(
  function: str, options: dict[str, Any], env: dict[str, str] | None = None
) -> dict[str, Any]:
  """Return the result of a function in a child process; {"error": text} if it fails.

  Args:
    function: "module.name", the module in this package.
    options: its arguments.
    env: variables that differ from ours; "" removes one.
  """
  whole = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | (env or {})
  # With our path: `-c` alone would put the current directory before Python's modules.
  code = f"import sys; sys.path[:] = {sys.path}; "
  code += "from jaxscale.jobs.preflight import child; child.answer()"
  command = [sys.executable, "-P", "-c", code, function, json.dumps(options)]
  whole = {name: value for name, value in whole.items() if value}
  try:
    done = subprocess.run(
      command, env=whole, stdin=subprocess.DEVNULL, capture_output=True, timeout=WAIT_S
    )
  except subprocess.TimeoutExpired:
    return {"error": f"JAX did not answer within {WAIT_S:g} s"}
  if done.returncode == 0:
    with contextlib.suppress(IndexError, ValueError):
      return json.loads(done.stdout.splitlines()[-1])
  return {"error": cause_of(done.stderr.decode(errors="replace"), done.returncode)}


def answer() -> None:
  """Run the function that `ask` names on the command line, in the child process."""
  module, _, name = sys.argv[1].partition(".")
  try:
    check_environment(os.environ)
    function = getattr(importlib.import_module(f"jaxscale.jobs.preflight.{module}"), name)
    result = function(**json.loads(sys.argv[2]))
  except ConfigError as e:
    result = {"error": str(e)}
  print(json.dumps(result))


def cause_of(stderr: str, code: int) -> str:
  """Return the line of stderr that says why JAX or XLA ended a process.

  The sentences are those of XLA's parse_flags_from_env.cc and command_line_flags.cc, as
  jaxlib 0.10.2 writes them.

  Example:
    >>> cause_of("F1121 x.cc:234] Unknown flag in XLA_FLAGS: --xla_foo=1", -6)
    'XLA_FLAGS: this jax does not know --xla_foo=1'
  """
  for pattern, meaning in _XLA_ERRORS.items():
    if match := re.search(pattern, stderr, re.M):
      return match.expand(meaning).rstrip()
  lines = [line.strip() for line in stderr.splitlines() if line.strip()]
  errors = [x for x in lines if re.match(r"\S*(Error|Exception)\b|error: |F\d{4} ", x)]
  return (errors or lines or [f"JAX ended with code {code}"])[-1].removeprefix("error: ")[:300]
