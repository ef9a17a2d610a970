"""One vocabulary: words that 0.2 replaced appear nowhere, in names or in prose.

Each pattern comes with the word to use instead.
"""

import re
import subprocess

import pytest

from support.paths import ROOT

# Modules at the root of 0.1 that moved or got another name.
OLD_MODULES = (
  "adaptive|batch_study|beside|build|carry_over|checkpoint_dir|checkpoint_files|"
  "checksum|damage|derive|describe|described|doctor|events|exchange_parts|exits|"
  "export|findings|fits|generate|holder|imagenet|in_flight|joining|layout_parts|"
  "lease|local_step|loop|losses|noise_scale|non_finite|overrides|parts|paths|"
  "plot_schedule|refusals|replicas|report|reporter|scaling|settings|simulated|"
  "spread|stage_loop|stages|stand_in|state|step|step_report|time_to_accuracy|"
  "trained|trials|workdir"
)

NAMES = {
  rf"\bjaxscale[./]({OLD_MODULES})(\.py)?\b": "its new place (CHANGELOG.md)",
  r"python3? -m jaxscale\.(?!train\b)\w": "jaxscale COMMAND",
  r"\broll_call\b|\bintroduction\b": "rendezvous.server, rendezvous.handshake",
  r"\bHub\b|\bcluster[./](hub|agreement|together)\b": "monitor, stop_consensus",
  r"\bverdict\b": "watch.fault_detection; outcome",
  r"\b[Ll]atch\b": "StopRequest",
  r"\bheed": "install, attach",
  r"\b[Ll]ease\b|\bholder(\.py|s)?\b": "lock, owner",
  r"\bcarry_over\b|\bin_flight\b": "checkpoint.reshard, checkpoint.write_limit",
  r"\bnon_finite\b|\brefusals\b": "nan_guard, nan_policy",
  r"\b(layout_|exchange_)?parts\.py\b": "experiment/",
  r"\bspread\.py\b|\bstage_loop\b|\bphase_loop\b": "microbatches, run.phases",
  r"\bstand_ins?\b": "abstract data; fake",
  r"\bentering\b|\bentered\(|\bBeside\b": "gather_params, ShardedAndFull",
  r"\bOwnGrads\b|\bparallel\.whole\b": "PipelineGrads, replicated_layout",
  r"\b[Ss]aid\b|\bstor(y|ies)\b": "UserMessage, summary, notes",
  r"\bjudge[ds]?\b": "check",
}

SETTINGS = {
  r"shard[\"']?\]?\s*=\s*[\"']?(nothing|optimizer|gradients|parameters)\b": (
    "none, zero1, zero2, fsdp"
  ),
  r"\b[Cc]onfig\.stages\b|\bcfg\.Stages\b|\bStages\(": "Config.phases, Phases",
  r"\bmost_skipped(_in_a_row)?\b": "max_skipped_steps, max_consecutive_skipped_steps",
  r"\b(beat|silence|meet|hang|before_end|starting|compiling|saving)_s\b": (
    "a name of cluster.Timeouts"
  ),
  r"\bsync\.every\b(?!_)": "sync.sync_every_steps",
  r"\bfaults\.(idle_)?restarts\b": "faults.max_restarts, faults.max_idle_restarts",
  r"\bconfig\.label_smoothing\b": "loss.label_smoothing",
}

_COUNTED = (
  "micro-batches|batch(es)?|examples|images|tokens|numbers|bytes|[MGT]B|seconds|µs|rows?|"
  "pieces|scale|scalar|entry|key|groups|tasks|processes|device|instances|heartbeats|"
  "executions|parameters|branches|inputs|rate|work|dim|dimension|pattern|one|two|line|"
  "times?|trial|token"
)
_PER = (
  "step|device|GPU|node|row|run|process|class|task|layer|group|epoch|job|kind|trial|byte|"
  "example|message|mesh axis|worker|host|block|seed"
)
_VERBS = "sends|holds|has|have|may|can|works|takes|of this|feeds|could|is|was|does|that"

PHRASES = {
  r"\bbesides?\b": "next to, with, and, alongside",
  r"\b(goes|go|going|gone|went) on\b": "resumes, continues",
  r"\b(what holds|held to)\b": "guarantees",
  r"\b(meet|meets|meeting|meetings|met)\b": "synchronize, rendezvous, match",
  r"\bmend(s|ed|ing)?\b": "fix",
  r"\bno numbers?\b": "NaN or Inf; no value",
  r"\brefused steps?\b|\bsteps? (is|was|are|were) refused\b": "skipped step",
  r"\b(is|are|was|were|be|been|not) (told|said)\b": "is logged, is reported",
  r"\bheld out\b": "held-out",
  r"\bmean way\b": "averaged pseudo-gradient",
  r"\b(model|parameter|array|state|leaf|tensor)s? lies?\b": "is sharded, is placed",
  rf"\b({_COUNTED}) an? ({_PER})\b(?!'s| ({_VERBS}))": "... per ...",
  r"\bwhat concerns\b": "a plain subject",
}

# Old words are the subject there, or the text is not ours.
EXEMPT = (
  "CHANGELOG.md", "LICENSE", "jaxscale/data/python_docs.LICENSE",
  "tests/docs/test_words.py", "tests/data/", "benchmarks/results/",
)  # fmt: skip
SUFFIXES = (
  ".py", ".pyi", ".md", ".toml", ".sbatch", ".sh", ".yaml", ".c", ".ipynb", "Makefile",
  ".ci/run",
)  # fmt: skip


def files():
  listed = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard"],
    cwd=ROOT, capture_output=True, text=True, check=True,
  ).stdout.splitlines()  # fmt: skip
  return [
    name
    for name in listed
    if name.endswith(SUFFIXES)
    and not name.startswith(EXEMPT)
    and (ROOT / name).is_file()
  ]


def findings(patterns):
  compiled = {re.compile(pattern): instead for pattern, instead in patterns.items()}
  found = []
  for name in files():
    for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
      for pattern, instead in compiled.items():
        if match := pattern.search(line):
          found.append(f"{name}:{number}: {match.group()!r}, write: {instead}")
  return found


@pytest.mark.parametrize(
  "patterns", [NAMES, SETTINGS, PHRASES], ids=["names", "settings", "phrases"]
)
def test_replaced_words_are_gone(patterns):
  found = findings(patterns)
  assert not found, "\n".join(found)


def test_test_files_are_named_as_what_they_test():
  kept = {path.stem for path in (ROOT / "jaxscale").rglob("*.py")} | {"paths"}
  old = {*OLD_MODULES.split("|"), "joined", "replicas_run", "spread_run"} - kept
  stems = {
    n: n.rpartition("/")[2].partition(".")[0] for n in files() if n[:5] == "tests"
  }
  assert [n for n, stem in stems.items() if stem.removeprefix("test_") in old] == []
