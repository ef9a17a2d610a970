"""Learning rates that transfer: the sweeps and the picture of docs/howto/transfer.md.

    python benchmarks/transfer.py [SEEDS [EXAMPLES]]

Sweeps the learning rate of AdamW in factors of 2 on the text that the package carries: at width
32, depth 2 and batch 16, and at width 256, depth 4 and batch 256 with the standard
parametrization and with CompleteP, whose base model is the small one. Initial matrices have the
standard deviation 1 / sqrt(width); with the default of 0.02, which suits widths of a thousand, the
small model would learn at first as if it had no layers. Every run takes the same examples of 16
bytes: 10,240 (640 and 40 steps) without an argument, and 38,400 (2,400 and 150 steps) in the long
form, in which a run of the large model takes two minutes on an idle core. Rates are those at batch
16; at batch 256 they are multiplied by 4 (the square-root rule, arXiv:2205.10287). A sweep begins
with five rates and continues in the direction of its best one until that is inside, with at most
nine. Results are kept in runs/transfer/, and runs that are done are not repeated. A run that
diverged has no loss. Writes benchmarks/results/transfer.json and docs/transfer.png.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from common import report

from jaxscale.config import AdamW, CompleteP, Config, Cosine, Log, Standard, Text, Transformer
from jaxscale.errors import EXIT_DONE, one_line_errors
from jaxscale.run.fit import fit
from jaxscale.training.loop import NonFiniteError

ROOT = Path(__file__).absolute().parent.parent
SEEDS, EXAMPLES = [*map(int, sys.argv[1:]), *(1, 10_240)[len(sys.argv) - 1 :]]
FIRST = range(-9, -4)  # rates 2^-9 to 2^-5
SMALL: Any = {"width": 32, "num_layers": 2, "hidden": 64, "num_heads": 4}
LARGE: Any = {"width": 256, "num_layers": 4, "hidden": 512, "num_heads": 4}
SWEEPS: dict[str, Any] = {
  "small": ("width 32, depth 2, batch 16", SMALL, 16, Standard()),
  "standard": ("width 256, depth 4, batch 256, standard", LARGE, 256, Standard()),
  "complete_p": ("width 256, depth 4, batch 256, CompleteP", LARGE, 256, CompleteP(base=SMALL)),
}


def config(sweep: str, power: int, seed: int) -> Config:
  """Return the config of a run."""
  _, sizes, batch, parametrization = SWEEPS[sweep]
  steps = EXAMPLES // batch
  base = getattr(parametrization, "base", sizes)
  return Config(
    model=Transformer(**sizes, pad_vocab_to=1, init_std=base["width"] ** -0.5),
    data=Text(sequence_length=16),
    optimizer=AdamW(lr=2.0**power, b2=0.95, weight_decay=0.1),
    schedule=Cosine(warmup_steps=steps // 10),
    parametrization=parametrization,
    batch_size=batch,
    steps=steps,
    lr_scaling="sqrt",
    lr_reference_batch_size=16,
    clip_norm=1.0,
    seed=seed,
    log=Log(plot=False),
  )


def loss(sweep: str, power: int, seed: int) -> float | None:
  """Return the validation loss after the last step; None if the run diverged."""
  folder = ROOT / "runs" / "transfer" / str(EXAMPLES)
  path, workdir = (folder / f"{sweep}{power}-{seed}{end}" for end in (".json", ""))
  if not path.exists():
    start = time.monotonic()
    try:
      value = fit(config(sweep, power, seed), workdir)[1]["loss"]
    except NonFiniteError:
      value = None
    path.write_text(json.dumps({"loss": value, "seconds": round(time.monotonic() - start, 1)}))
    shutil.rmtree(workdir)
  return json.loads(path.read_text())["loss"]


def sweep(name: str, seeds: int) -> dict[int, float | None]:
  """Return the mean losses by the power of 2 of the rate, with the best one inside."""
  losses, powers = {}, list(FIRST)
  while powers:
    for power in powers:
      each: list[Any] = [loss(name, power, seed) for seed in range(seeds)]
      losses[power] = None if None in each else statistics.fmean(each)
    top = best(losses)
    around = [top - 1, top + 1] if len(losses) < 9 else []
    powers = [power for power in around if power not in losses]
  return dict(sorted(losses.items()))


def best(losses: dict[int, Any]) -> int:
  """Return the power of the best rate."""
  return min(losses, key=lambda power: math.inf if losses[power] is None else losses[power])


def draw(sweeps: dict[str, dict[int, Any]], path: Path) -> None:
  """Draw the losses against the rate at batch 16."""
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot as plt

  figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
  for name, losses in sweeps.items():
    done = {power: x for power, x in losses.items() if x is not None}
    (line,) = axes.plot([2.0**p for p in done], [*done.values()], "o-", label=SWEEPS[name][0])
    axes.plot(2.0 ** best(losses), losses[best(losses)], "*", ms=14, color=line.get_color())
  axes.set(xscale="log", xlabel="learning rate at batch 16", ylabel="validation loss (nats)")
  axes.set_xscale("log", base=2)
  axes.legend(frameon=False, fontsize=8)
  figure.savefig(path, dpi=120)


def markdown(sweeps: dict[str, dict[int, Any]]) -> str:
  """Return the losses as a table in Markdown, the best one of each sweep in bold."""
  powers = sorted({power for losses in sweeps.values() for power in losses})
  lines = ["| | " + " | ".join(f"2^{power}" for power in powers) + " |"]
  lines.append("|---" * (len(powers) + 1) + "|")
  for name, losses in sweeps.items():
    cells = []
    for power in powers:
      value = losses.get(power, 0.0)
      text = "diverged" if value is None else f"{value:.3f}" if value else ""
      cells.append(f"**{text}**" if power == best(losses) else text)
    lines.append(f"| {SWEEPS[name][0]} | {' | '.join(cells)} |")
  return "\n".join(lines)


@one_line_errors
def main() -> int:
  (ROOT / "runs" / "transfer" / str(EXAMPLES)).mkdir(parents=True, exist_ok=True)
  sweeps = {name: sweep(name, SEEDS) for name in SWEEPS}
  tops = {name: best(losses) for name, losses in sweeps.items()}
  print(markdown(sweeps))
  draw(sweeps, ROOT / "docs" / "transfer.png")
  ratios = {name: 2.0 ** (tops[name] - tops["small"]) for name in tops}
  losses = {name: {f"2^{p}": x for p, x in each.items()} for name, each in sweeps.items()}
  report("transfer", seeds=SEEDS, examples=EXAMPLES, losses=losses, best_over_small=ratios)
  return EXIT_DONE


if __name__ == "__main__":
  sys.exit(main())
