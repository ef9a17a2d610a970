from .load import Imported as Imported
from .load import import_safetensors as import_safetensors
from .names import NAMINGS as NAMINGS
from .save import Leaf as Leaf
from .save import UnwrittenError as UnwrittenError
from .save import export_leaves as export_leaves
from .save import export_safetensors as export_safetensors
