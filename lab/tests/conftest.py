"""The laboratory's tests have the product's fixtures and options."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "pool"))
from package import register_package  # noqa: E402

sys.path.pop(0)
register_package(ROOT)

from pipemesh.tests.conftest import *  # noqa: E402, F403
