"""Digits on three nodes; the storage of node n2 stops answering once.

Command    jaxscale submit --config docs/pictures/storage.py --nodes 3 --name digits
           touch /tmp/jaxscale_storage_stops        (while it trains)
Hardware   the Slurm cluster of the tests, `sudo python tests/support/slurm`, 2 CPU cores
Result     pictures/hang.txt (2026-11-26); the checkpoint of step 685 equals that of a run
           without the hang, bit for bit
"""

import os
import socket
import time

from jaxscale import config
from jaxscale.config import CNN, SGD, Checkpoint, Config, Cosine, Evaluation


class Storage(config.Data):
  """Digits whose loading hangs on the host `slow` once the file `marker` exists.

  Attributes:
    marker: a path; the hanging process renames the file, so it hangs only once.
    slow: a host name.
  """

  marker: str = "/tmp/jaxscale_storage_stops"
  slow: str = "n2"

  def build(self):
    """Return the training and validation sets."""
    train, test = config.Digits(augment="shift").build()

    def load(indices, draws):
      if socket.gethostname() == self.slow and os.path.exists(self.marker):
        os.rename(self.marker, self.marker + ".seen")
        time.sleep(1e6)
      return train.load(indices, draws)

    return train._replace(load=load), test


def get_config() -> Config:
  """Return configs/digits.py with a batch size that three nodes divide evenly."""
  return Config(
    model=CNN(features=(32, 64), dense=128, dropout=0.5),
    data=Storage(),
    optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=5e-4),
    schedule=Cosine(warmup_epochs=2),
    batch_size=126,
    epochs=60,
    evaluation=Evaluation(every_epochs=20),
    checkpoint=Checkpoint(every_epochs=5),
  )
