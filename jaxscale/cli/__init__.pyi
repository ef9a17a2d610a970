from .commands import COMMANDS as COMMANDS
from .commands import load as load
from .dispatch import main as main
from .start import entry as entry
