from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .remote import Remote


class InPool:
    """A MODEL that a pool computes. Who only asks whether one is that imports nothing of pools."""

    remote: Remote
