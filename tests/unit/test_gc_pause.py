"""Garbage collection waits until a run trains, and only then."""

import gc

import pytest

from jaxscale.run.gc_pause import paused_gc, resume_gc


@pytest.fixture(autouse=True)
def as_before():
  was = gc.isenabled()
  yield
  (gc.enable if was else gc.disable)()


def test_it_is_off_until_training_begins_and_then_on():
  with paused_gc():
    assert not gc.isenabled()
    made = [[] for _ in range(10_000)]
    resume_gc()
    assert gc.isenabled()
    # What was there is old when training begins.
    assert len(gc.get_objects(generation=0)) < len(made)
    assert any(x is made[0] for x in gc.get_objects(generation=2))
  assert gc.isenabled() and gc.get_freeze_count() == 0
  with pytest.raises(ZeroDivisionError), paused_gc():
    1 / 0  # noqa: B018
  assert gc.isenabled()


def test_who_had_it_off_keeps_it_off():
  gc.disable()
  with paused_gc():
    resume_gc()
    assert not gc.isenabled()
  assert not gc.isenabled()
