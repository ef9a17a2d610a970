"""Numbers with the bounds that `settings` holds them to."""

from __future__ import annotations

from typing import Annotated

Positive = Annotated[float, "> 0"]
NonNegative = Annotated[float, ">= 0"]
Fraction = Annotated[float, "in [0, 1)"]
Count = Annotated[int, ">= 1"]
