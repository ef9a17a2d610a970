"""Names of JAX that are not public: there in this JAX, and harmless to lose."""

import importlib
import inspect
import sys
import types

import jax
import pytest

from jaxscale.cluster import jax_internals
from jaxscale.cluster.host_collectives import leader_first
from jaxscale.cluster.watch import stacks
from jaxscale.errors import ConfigError


def test_this_jax_has_all_of_them():
  for module, name in jax_internals._STATE, jax_internals._DEVICE_HASH:
    assert hasattr(importlib.import_module(module), name), name
  source = inspect.getsource(importlib.import_module("jax._src.callback"))
  assert jax_internals.CALLBACK in source  # a function in a function
  assert hasattr(jax.typeof(0.0), "mat")
  assert hasattr(jax.ShapeDtypeStruct((), "float32"), "manual_axis_type")


def test_without_the_state_of_processes_nobody_waits(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  monkeypatch.delattr("jax._src.distributed.global_state")
  assert jax_internals.coordination_client() is None
  with leader_first("compile", 1000.0):  # would wait for process 0
    pass
  monkeypatch.setitem(sys.modules, "jax._src.distributed", None)
  assert jax_internals.coordination_client() is None


def test_the_key_of_a_program_has_the_content_instead_of_devices(monkeypatch):
  key = importlib.import_module("jax._src.cache_key")
  original, hashed = key._hash_accelerator_config, []
  with jax_internals.devices_hashed_as(b"one kind"):
    key._hash_accelerator_config(types.SimpleNamespace(update=hashed.append), None)
  assert hashed == [b"one kind"] and key._hash_accelerator_config is original
  monkeypatch.delattr(key, "_hash_accelerator_config")
  with jax_internals.devices_hashed_as(b"one kind"):  # keys stay as they are
    assert not hasattr(key, "_hash_accelerator_config")
  assert not hasattr(key, "_hash_accelerator_config")


@pytest.mark.parametrize("name", [jax_internals.CALLBACK, "_renamed"])
def test_a_callback_of_another_name_is_not_named(name):
  """Found in the stack of this thread by the name of JAX's function alone."""
  found, scope = [], {}
  exec(compile(f"def {name}(f): f()", jax_internals.SOURCE + "callback.py", "exec"), scope)
  scope[name](lambda: found.append(stacks.find_callback()))
  is_known = name == jax_internals.CALLBACK
  assert ("a callback of the model" in found[0]) is is_known


def test_types_without_axes_are_one_line():
  assert jax_internals.varying_axes(jax.typeof(1.0)) == frozenset()
  assert jax_internals.varying_axes(jax.ShapeDtypeStruct((), "int32")) == frozenset()
  with pytest.raises(ConfigError, match=r"^jax=0\..* install jax>=0.10,<0.13$"):
    jax_internals.varying_axes(types.SimpleNamespace())
