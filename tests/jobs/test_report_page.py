"""The HTML page of a report: of whole, of damaged and of hostile records."""

import json
from html.parser import HTMLParser

import pytest

from jaxscale.cli import main
from jaxscale.jobs.page import write_page

ATTACK = "<script>alert(1)</script>"
CONFIG = {"class": "Config", "seed": 7, "model": {"class": "CNN", "dense": ATTACK}}


class Page(HTMLParser):
  """Its tags, and its texts without those of styles."""

  def __init__(self, path):
    super().__init__()
    self.open, self.seen, self.texts = [], set(), []
    self.feed(path.read_text(encoding="utf-8"))

  def handle_starttag(self, tag, attrs):
    self.seen.add(tag)
    assert not {"src", "href"} & {name for name, _ in attrs}, "it loads something"
    if tag not in ("meta", "img", "br"):
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    if "style" not in self.open:
      self.texts.append(data.strip())


def workdir(path, **files):
  """Write a workdir with these files; values other than text are written as JSON."""
  path.mkdir()
  files = {"config.json": {"config": CONFIG}} | files
  for name, content in files.items():
    (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
  return path


def lines(*values):
  return "".join(json.dumps(value) + "\n" for value in values)


def test_a_run_is_shown_with_all_that_is_on_record(tmp_path, monkeypatch, capsys):
  perf = {"perf/examples_per_s": 900.0, "perf/mfu": 0.25, "train/loss": 0.5}
  spent = {"starting": 4.0, "step": 6.0}
  activity = {"start": 100.0, "seconds": spent, "resumed": [0], "queued": None, "done": False}
  again = {"start": 130.0, "seconds": spent, "resumed": [2], "queued": None, "done": True}
  started = {"commit": "0123abc", "host": "node7", "command": f"jaxscale {ATTACK}"}
  done = dict(outcome="done", step=8, total_steps=8, devices="2 x cpu", accuracy=0.875)
  files = {
    "metrics.jsonl": lines(*({"step": 2 * i, "time": 1.0 * i} | perf for i in range(1, 5))),
    "summary.json": done | {"peak_tflops_per_device": 0.5, "peak_source": ATTACK},
    "activity.jsonl": lines(activity | dict(time=110.0, step=4), again | dict(time=140.0, step=9)),
    "starts.jsonl": lines(started | {"packages": {"jax": "0.10"}}),
  }
  path = workdir(tmp_path / "a&b", **files)
  monkeypatch.chdir(tmp_path)
  main(["report", str(path), "--html", "page.html"])
  assert capsys.readouterr().out == "page.html\n"
  assert sorted(p.name for p in tmp_path.iterdir()) == ["a&b", "page.html"]
  page = Page(tmp_path / "page.html")
  assert not page.open and "svg" in page.seen and "script" not in page.seen
  texts = page.texts
  assert "a&b" in texts and "0123abc" in texts and f"jaxscale {ATTACK}" in texts
  assert "Done after 8 of 8 steps on 2 x cpu, validation accuracy 87.50%." in texts
  at = texts.index("MFU")
  assert texts[at : at + 5] == ["MFU", "25.0%", "25.0%", "25.0%", "4"]
  assert texts[texts.index("seed") + 1] == "7"
  # 20 s between the starts, and what came after step 2 was done twice.
  (spent,) = [t for t in texts if t.startswith("goodput ")]
  assert "down 0:20" in spent and "lost 0:0" in spent


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": {}}', "\0" * 99, "[" * 9999])
def test_damaged_records_are_left_out(tmp_path, content):
  names = "metrics.jsonl", "summary.json", "activity.jsonl", "starts.jsonl"
  path = workdir(tmp_path / "run", **dict.fromkeys(names, content))
  (path / "config.json").write_text(content)
  write_page(tmp_path / "page.html", [path], None)
  page = Page(tmp_path / "page.html")
  assert "At step 0; no summary.json yet." in page.texts and not page.open


def test_what_cannot_be_shown_is_one_line(tmp_path, capsys):
  path = workdir(tmp_path / "run")
  asked = ["report", str(path), "--html", str(tmp_path / "run" / "config.json" / "page.html")]
  for command, why in (
    (asked, "give a file in a directory"),
    (["report", str(tmp_path / "gone"), "--html", "x.html"], "no such run"),
  ):
    assert main(command) == 2
    assert why in capsys.readouterr().err
