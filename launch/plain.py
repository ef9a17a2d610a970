"""Train without a config or a launcher: `jax.distributed.initialize` and public functions.

    sbatch --nodes=4 --gpus-per-node=8 --ntasks-per-node=8 launch/plain.sbatch
    python launch/plain.py        # one process on this machine

Replace data and model by your own. This script neither saves checkpoints nor reports hangs.
`colabs/flat_loop.py` also saves and resumes, and `jaxscale train` and `jaxscale.fit` do both.
"""

import os

import jax

import jaxscale as jxs
from jaxscale import data, models, optim
from jaxscale.mesh import host_shard

BATCH_SIZE, STEPS = 128, 200


def connect() -> None:
  """Connect this process to the others before JAX looks for devices.

  `jax.distributed.initialize` reads the number of processes and the address of process 0
  from Slurm's variables. Where another launcher starts the processes, set
  JAX_COORDINATOR_ADDRESS=HOST:PORT, NUM_PROCESSES and PROCESS_ID.
  """
  if "JAX_COORDINATOR_ADDRESS" in os.environ:
    num_processes, process_id = int(os.environ["NUM_PROCESSES"]), int(os.environ["PROCESS_ID"])
    jax.distributed.initialize(num_processes=num_processes, process_id=process_id)
  elif int(os.environ.get("SLURM_NTASKS", "1")) > 1:
    jax.distributed.initialize()


def main() -> None:
  """Train a CNN on the handwritten digits and print its validation accuracy."""
  connect()
  is_first = jax.process_index() == 0
  mesh = jxs.make_mesh()  # all devices of all processes
  shard = host_shard(mesh)  # the rows of each batch that this process loads
  if is_first:
    print(f"processes: {jax.process_count()}, devices: {mesh.size}", flush=True)

  train, test = data.digits("train"), data.digits("test")
  cnn = models.CNNModule(num_classes=train.info.num_classes)
  model = models.functions(cnn, train.info.image_shape, mean=train.info.mean, std=train.info.std)
  schedule = optim.warmup_cosine(peak=0.1, warmup_steps=20, total_steps=STEPS)
  tx = optim.sgd(schedule)

  state = jxs.init_state(model.init, tx, mesh, seed=0)
  loss = jxs.classification_loss(model.apply)
  train_step = jxs.make_train_step(loss, tx, mesh, schedule=schedule)
  eval_step = jxs.make_eval_step(jxs.classification_totals(model.apply), mesh)

  batches = data.to_device(data.train_batches(train, BATCH_SIZE, shard=shard), mesh)
  for step in range(1, STEPS + 1):
    state, metrics = train_step(state, next(batches))
    if is_first and step % 50 == 0:
      print(f"step {step} loss {float(metrics['loss']):.4f}", flush=True)

  validation = data.to_device(data.eval_batches(test, BATCH_SIZE, shard=shard), mesh)
  result = jxs.evaluate(eval_step, *state.evaluated(), validation)
  if is_first:
    print(f"validation accuracy {result['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
  main()
