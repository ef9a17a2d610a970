"""LoRA there and here: transformers and PEFT train the same adapter, and read what we export."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
for package in ("transformers", "peft"):
  pytest.importorskip(package)

import jax
import numpy as np
import peft
import torch
import transformers

from jaxscale import config as cfg
from jaxscale import data
from jaxscale.experiment.build import experiment
from jaxscale.mesh import batch_sharding
from jaxscale.run.export import export
from jaxscale.run.workdir import describe
from support.saving import save

STEPS, ROWS, LENGTH, WORDS, RANK, ALPHA = 20, 8, 16, 48, 4, 8
LR, DECAY = 1e-2, 0.01
MODULES = ["q_proj", "v_proj", "down_proj"]
PREFIX = "base_model.model.model.layers"
OURS = {"q": "self_attn.q_proj", "v": "self_attn.v_proj", "down": "mlp.down_proj"}


class Chats(cfg.Data):
  """Random tokens, of which the last half is learned, as the answer of a chat."""

  def build(self):
    info = data.TextInfo("chats", WORDS, LENGTH)

    def load(indices, draws):
      del draws
      rows = [chat(int(i)) for i in indices]
      return {
        "tokens": np.stack([r[:-1] for r in rows]),
        "targets": np.stack([learned(r) for r in rows]),
      }

    return tuple(data.Dataset(info, STEPS * ROWS, load) for _ in range(2))


def chat(i):
  return np.random.default_rng(i).integers(0, WORDS, LENGTH + 1).astype(np.int32)


def learned(row):
  targets = row[1:].copy()
  targets[: LENGTH // 2] = -1
  return targets


def batch(step):
  load = Chats().build()[0].load
  return load(np.arange(step * ROWS, (step + 1) * ROWS), np.zeros(ROWS, np.int64))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Train the same adapter there and here; return both, and the losses of each step."""
  folder = tmp_path_factory.mktemp("peft")
  torch.manual_seed(0)
  sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
  settings = transformers.LlamaConfig(
    vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, **sizes
  )
  base = transformers.LlamaForCausalLM(settings)
  for name, x in base.named_parameters():
    if x.ndim == 2:  # so that answers depend on questions
      torch.nn.init.normal_(x, std=x.shape[1] ** -0.5 * (0.5 if "embed" not in name else 6))
  base.save_pretrained(folder / "base")
  lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES, task_type="CAUSAL_LM")
  theirs = peft.get_peft_model(base, lora)

  config = cfg.Config(
    model=cfg.Transformer(num_layers=2, width=32, num_heads=4, num_kv_heads=2, hidden=64),
    data=Chats(),
    optimizer=cfg.AdamW(lr=LR, weight_decay=DECAY),
    schedule=cfg.Steps(boundaries=(), warmup_epochs=0),
    batch_size=ROWS,
    steps=STEPS,
    init_from=str(folder / "base"),
    adapter=cfg.LoRA(rank=RANK, alpha=ALPHA, targets="layers/(q|v|down)/kernel"),
  )
  made = experiment(config)
  state = with_factors(made.init_state(), theirs)
  optimizer = torch.optim.AdamW(
    [x for x in theirs.parameters() if x.requires_grad], lr=LR, weight_decay=DECAY
  )
  losses = []
  for step in range(STEPS):
    arrays = batch(step)
    tokens, targets = (torch.from_numpy(arrays[n]).long() for n in ("tokens", "targets"))
    logits = theirs(tokens).logits
    loss = torch.nn.functional.cross_entropy(
      logits.flatten(0, 1), targets.flatten(), ignore_index=-1
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state, metrics = made.train_step(state, jax.device_put(arrays, batch_sharding(made.mesh)))
    losses.append((float(loss), float(metrics["loss"])))
  run = folder / "run"
  run.mkdir()
  (run / "config.json").write_text(json.dumps(describe(made)))
  save(run / "checkpoints", state)
  return SimpleNamespace(folder=folder, run=run, theirs=theirs.eval(), losses=np.array(losses))


def with_factors(state, theirs):
  """Return our state with the initial factors of theirs."""
  found = {n: x.detach().numpy() for n, x in theirs.state_dict().items()}
  layers = dict(state.params["layers"])
  for ours, name in OURS.items():
    leaves = dict(layers[ours])
    for factor in "AB":
      names = [f"{PREFIX}.{i}.{name}.lora_{factor}.default.weight" for i in range(2)]
      old = leaves[f"kernel_lora_{factor.lower()}"]
      new = np.stack([found[n].T for n in names])
      if factor == "A":  # both draw from the same range
        limit = new.shape[1] ** -0.5
        assert max(abs(np.asarray(old)).max(), abs(new).max()) <= limit
      leaves[f"kernel_lora_{factor.lower()}"] = jax.device_put(new, old.sharding)
    layers[ours] = leaves
  return state._replace(params=state.params | {"layers": layers})


def test_losses_are_equal_for_twenty_steps(trained):
  theirs, ours = trained.losses.T
  assert theirs[0] - theirs[-1] != 0 and np.ptp(theirs) > 0.05
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def logits_of(model):
  with torch.no_grad():
    return model(torch.from_numpy(batch(0)["tokens"]).long()).logits.numpy()


def assert_alike(found, expected):
  assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()


def test_the_adapter_loads_in_peft(trained):
  to = trained.folder / "adapter" / "adapter_model.safetensors"
  to.parent.mkdir()
  assert "peft" in export(trained.run, to, "peft")
  base = transformers.LlamaForCausalLM.from_pretrained(trained.folder / "base")
  before = logits_of(base)
  loaded = peft.PeftModel.from_pretrained(base, to.parent).eval()
  assert loaded.peft_config["default"].target_modules == set(MODULES)
  assert_alike(logits_of(loaded), logits_of(trained.theirs))
  assert np.abs(logits_of(loaded) - before).max() > 0.1


def test_the_merged_export_has_the_logits_of_the_adapted_model(trained):
  to = trained.folder / "merged" / "model.safetensors"
  to.parent.mkdir()
  export(trained.run, to, "huggingface")
  merged = transformers.LlamaForCausalLM.from_pretrained(to.parent)
  assert_alike(logits_of(merged), logits_of(trained.theirs))
