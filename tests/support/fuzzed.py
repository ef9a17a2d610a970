"""Tests of readers with random inputs, and with inputs that once failed."""

from hypothesis import example, given

from support.fuzzing import fuzz


def fuzzed(*strategies, examples=(), share=1):
  """Return a decorator that runs a test with random inputs and with the examples.

  Args:
    strategies: a strategy per input.
    examples: an input, or a tuple of several inputs, per example.
    share: the factor by which fewer inputs are tried, for slow tests.
  """

  def decorate(test):
    for case in examples:
      test = example(*case if isinstance(case, tuple) else (case,))(test)
    return fuzz(given(*strategies)(test), share)

  return decorate
