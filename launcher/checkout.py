"""Finds the root of the checkout, or of the published pack."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
