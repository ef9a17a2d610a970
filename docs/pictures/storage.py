"""The digits on three nodes, from storage that stops answering once, on node n2.

Command    jaxscale submit --config docs/pictures/storage.py --nodes 3 --name digits
           touch /tmp/jaxscale_storage_stops        (while it trains)
Hardware   the Slurm of the tests, `sudo python tests/support/slurm`, 2 CPU cores
Result     2026-11-23: pictures/hang.txt; the checkpoint of step 685 is that of the
           same run without the file, bit for bit
"""

import os
import socket
import time

from jaxscale import config
from jaxscale.config import CNN, SGD, Checkpoint, Config, Cosine, Evaluation


class Storage(config.Data):
  """The digits; the node `slow` waits for ever once the file `marker` exists.

  Attributes:
    marker: it is renamed, so that it happens once.
    slow: name of the host.
  """

  marker: str = "/tmp/jaxscale_storage_stops"
  slow: str = "n2"

  def build(self):
    """Training and held-out examples."""
    train, test = config.Digits(augment="shift").build()

    def load(indices, draws):
      if socket.gethostname() == self.slow and os.path.exists(self.marker):
        os.rename(self.marker, self.marker + ".seen")
        time.sleep(1e6)
      return train.load(indices, draws)

    return train._replace(load=load), test


def get_config() -> Config:
  """As configs/digits.py, but for the batch, which three nodes divide."""
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
