"""benchmarks/accelerator.py at tiny sizes, on the CPU, against PyTorch and others."""

import json

import pytest

from others.packages import timm, torch, torchvision, transformers
from support.commands import run_python
from support.compiling import fast_compile_env
from support.paths import ROOT

MODELS = ("resnet50", "layers_8b", "transformer_1b", "vit_b16")
INSTALLED = {"torch": torch and torchvision, "timm": timm, "transformers": transformers}
COMMAND = "benchmarks/accelerator.py", "--tiny", "--turns", "1"


@pytest.mark.skipif(torch is None, reason="compares with PyTorch")
def test_every_section_has_its_rows(tmp_path):
  kept = {path.name for path in (ROOT / "benchmarks/results").iterdir()}
  env = fast_compile_env() | {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "default"}
  done = run_python(*COMMAND, "--out", tmp_path, timeout=1400, **env)
  assert done.returncode == 0, done.stderr
  assert kept == {path.name for path in (ROOT / "benchmarks/results").iterdir()}
  results = [json.loads(line) for line in done.stdout.splitlines()]
  files = [tmp_path / f"accelerator_{part}.json" for part in (1, 2, 3)]
  assert [json.loads(file.read_text()) for file in files] == results
  assert all(r["errors"] == 0 and r["left_out"] == {} for r in results), done.stderr

  first, *others = (result["sections"] for result in results)
  assert first["train"][0]["outcome"] == "done" and first["train"][0]["accuracy"] > 0.5
  (tests,) = first["tests"]
  assert tests["not_passed"] == [] and tests["passed"] > 10 and tests["on"] == "cpu"
  assert first["feed"][0]["images_per_s"] > 0
  assert [row["options"] for row in first["variants"]] and len(first["variants"]) == 2
  for sections, models in zip(others, (MODELS[:2], MODELS[2:]), strict=True):
    rows = sections[models[0]] + sections[models[1]]
    rows += sections["others_2" if models[0] == "resnet50" else "others_3"]
    libraries = ["timm" if name in ("resnet50", "vit_b16") else "transformers" for name in models]
    assert [row["side"] for row in rows] == 2 * ["ours", "torch", "ours"] + libraries
    for row in rows:
      if INSTALLED.get(row["side"], True) is None:
        assert row["left_out"] == f"{row['side']} is not installed"
      else:
        check_step(row)
  assert others[0]["resnet50"][0]["loop_ratio"] > 0
  assert len(others[1]["exchange"]) == 4 and others[1]["save"][0]["state_mb"] > 0


def check_step(row):
  unit = "images" if row["model"] in ("resnet50", "vit_b16") else "tokens"
  rate = row["size"]["rows"] * row["size"].get("tokens", 1) / row["step_ms"] * 1e3
  assert abs(row[f"{unit}_per_s"] / rate - 1) < 0.05
  assert row["mfu"] is None and row["device"] == "cpu"  # which has no published peak
  assert row["peak_memory_gb"] > 0.05 and row["compile_s"] > 0
  assert row["xla_s"] > 0 if row["side"] == "ours" else row["speed"] > 0


def test_a_part_without_a_gpu_is_refused():
  done = run_python(*COMMAND[:1], "--part", "1", JAX_PLATFORMS="cpu")
  assert done.returncode == 2
  assert done.stderr.endswith("JAX finds no GPU here; --tiny tests the code on a CPU\n")


def test_what_is_left_out_is_in_the_file(tmp_path):
  options = "--part", "2", "--minutes", "0", "--out", tmp_path
  done = run_python(*COMMAND, *options, JAX_PLATFORMS="cpu", PYTHONWARNINGS="default")
  assert done.returncode == 0, done.stderr
  result = json.loads((tmp_path / "accelerator_2.json").read_text())
  assert result["sections"] == {} and {*result["left_out"]} >= {"resnet50", "layers_8b"}
