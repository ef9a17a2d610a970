"""Calls of functions that need JAX in child processes of the preflight.

XLA aborts a process with an unknown flag, and JAX holds an accelerator as long as its
process lives. So a child process calls one function, which returns JSON values, and prints
the result as its last line.
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

WAIT_S = 90.0  # seconds; JAX's import from a cold parallel file system is slow
_XLA_ERRORS = {
  r"Unknown flags? in XLA_FLAGS: (.*)": r"XLA_FLAGS: unknown to this jaxlib: \1",
  r"Couldn't interpret value (\S*) for flag (\S+?)\.?$": r"XLA_FLAGS: invalid value of --\2: \1",
  r'Could not open file "(.*?)" to read flags': r"XLA_FLAGS=\1: not a file; flags begin with --",
}


def ask(
  function: str, options: dict[str, Any], env: dict[str, str] | None = None
) -> dict[str, Any]:
  """Call a function in a child process; return its result, or {"error": text}.

  Args:
    function: the function as "module.name", with a module of this package.
    options: the arguments of the function.
    env: environment variables to change; "" removes a variable.
  """
  variables = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | (env or {})
  # The child gets this process's path: `-c` would put the current directory first.
  code = f"import sys; sys.path[:] = {sys.path}; "
  code += "from jaxscale.jobs.preflight import child; child.answer()"
  command = [sys.executable, "-P", "-c", code, function, json.dumps(options)]
  whole = {name: value for name, value in variables.items() if value}
  try:
    done = subprocess.run(command, env=whole, input=b"", capture_output=True, timeout=WAIT_S)
  except subprocess.TimeoutExpired:
    return {"error": f"JAX did not answer within {WAIT_S:g} s"}
  if done.returncode == 0:
    with contextlib.suppress(IndexError, ValueError):
      return json.loads(done.stdout.splitlines()[-1])
  return {"error": cause_of(done.stderr.decode(errors="replace"), done.returncode)}


def answer() -> None:
  """Run in the child process the function from the command line that `ask` built."""
  module, _, name = sys.argv[1].partition(".")
  try:
    check_environment(os.environ)
    function = getattr(importlib.import_module(f"jaxscale.jobs.preflight.{module}"), name)
    result = function(**json.loads(sys.argv[2]))
  except ConfigError as e:
    result = {"error": str(e)}
  print(json.dumps(result))


def cause_of(stderr: str, code: int) -> str:
  """Return the line of stderr with the reason why JAX or XLA ended a process.

  The known messages come from XLA's parse_flags_from_env.cc and command_line_flags.cc in
  jaxlib 0.10.2.

  Example:
    >>> cause_of("F1121 x.cc:234] Unknown flag in XLA_FLAGS: --xla_foo=1", -6)
    'XLA_FLAGS: unknown to this jaxlib: --xla_foo=1'
  """
  for pattern, meaning in _XLA_ERRORS.items():
    if match := re.search(pattern, stderr, re.M):
      return match.expand(meaning).rstrip()
  lines = [line.strip() for line in stderr.splitlines() if line.strip()]
  errors = [x for x in lines if re.match(r"\S*(Error|Exception)\b|error: |F\d{4} ", x)]
  return (errors or lines or [f"JAX ended with code {code}"])[-1].removeprefix("error: ")[:300]
