"""The names of the ways to keep a model's weights, as ``keeping.py`` chooses among them."""

from __future__ import annotations

from typing import Literal

Kept = Literal["whole", "sharded", "offloaded"]
WAYS: tuple[Kept, ...] = ("whole", "sharded", "offloaded")
ASKED = ("auto", *WAYS)
