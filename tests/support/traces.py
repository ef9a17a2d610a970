"""Traces as XLA's own converter writes them for trace viewers."""

import gzip
import json

from jaxscale.run.trace_request import process_file


def viewer_events(folder, process=0):
  """Return the events of a process in a trace's folder."""
  with gzip.open(process_file(folder, process, ".trace.json.gz")) as file:
    return [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]


def steps_of(events):
  """Return the numbers of the training steps in order of time."""
  steps = sorted((e["ts"], int(e["args"]["step_num"])) for e in events if e["name"] == "train")
  return [step for _, step in steps]
