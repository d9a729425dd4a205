"""Read the English texts of ``locales/en``. The page shows them in every language; the report, the
log and the commands use the same English ones, so that each sentence is written once.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ENGLISH = Path(__file__).resolve().parents[1] / "locales" / "en"


@dataclass(frozen=True)
class Text:
    """A sentence of ``locales/*/main.json``: its ``name`` there, and the ``values`` that stand for
    its %1, %2 and so on.
    """

    name: str
    values: tuple[str, ...] = ()

    @property
    def english(self) -> str:
        sentence = english("main")["pipemesh"][self.name]
        return re.sub(r"%(\d)", lambda place: self.values[int(place[1]) - 1], sentence)


@cache
def english(file: str) -> dict[str, Any]:
    """Return the content of one of the English text files."""
    return json.loads((ENGLISH / f"{file}.json").read_text(encoding="utf-8"))
