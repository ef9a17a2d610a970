"""Tests of readers with inputs at random, and with those that once did harm."""

from hypothesis import example, given

from support.fuzzing import fuzz


def fuzzed(*strategies, examples=(), share=1):
  """Return a decorator that runs a test with inputs of these strategies and with the examples.

  Args:
    strategies: of each input.
    examples: an input each, or a tuple of several inputs.
    share: by which fewer inputs are tried, where one is slow.
  """

  def decorate(test):
    for case in examples:
      test = example(*case if isinstance(case, tuple) else (case,))(test)
    return fuzz(given(*strategies)(test), share)

  return decorate
