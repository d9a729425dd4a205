"""Where the checkout, or the published pack, lies."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
