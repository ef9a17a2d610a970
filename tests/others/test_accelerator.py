"""benchmarks/accelerator.py at tiny sizes, on the CPU, against PyTorch and others."""

import json

import pytest

from others.packages import timm, torch, torchvision, transformers
from support.commands import run_python
from support.compiling import fast_compile_env
from support.paths import ROOT

MODELS = ("resnet50", "layers_8b", "transformer_1b", "vit_b16")
INSTALLED = {"torch": torch and torchvision, "timm": timm, "transformers": transformers}


@pytest.mark.skipif(torch is None, reason="compares with PyTorch")
def test_every_section_has_its_rows():
  kept = ROOT / "benchmarks/results/accelerator.json"
  before = kept.read_bytes() if kept.exists() else None
  command = ["benchmarks/accelerator.py", "--tiny", "--turns", "1", "--minutes", "9"]
  env = fast_compile_env() | {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "default"}
  done = run_python(*command, timeout=590, **env)
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  assert (kept.read_bytes() if kept.exists() else None) == before

  sections = result["sections"]
  assert {*sections} == {*MODELS, "loop", "exchange", "feed", "save", "tests"}
  assert result["errors"] == 0 and result["left_out"] == {}, done.stderr
  for name in MODELS:
    sides = {row["side"]: row for row in sections[name]}
    library = "timm" if name in ("resnet50", "vit_b16") else "transformers"
    assert [*sides] == ["ours", "torch", library]
    unit = "tokens" if library == "transformers" else "images"
    for side, row in sides.items():
      if side != "ours" and INSTALLED[side] is None:
        assert row["left_out"] == "not installed"
        continue
      rows = row["size"]["rows"] * row["size"].get("tokens", 1)
      rate = rows / row["step_ms"] * 1e3
      assert abs(row[f"{unit}_per_s"] / rate - 1) < 0.05
      assert row["mfu"] is None  # a CPU has no published peak
      assert row["peak_memory_gb"] > 0.05 and row["compile_s"] > 0
      assert side == "ours" or row["speed"] >= row["least"] > 0
  assert sections["loop"][0]["ratio"] > 0
  assert len(sections["exchange"]) == 4 and sections["feed"][0]["share_of_need"] > 0
  assert sections["save"][0]["state_mb"] > 0
  (tests,) = sections["tests"]
  assert tests["not_passed"] == [] and tests["passed"] > 10 and tests["on"] == "cpu"
