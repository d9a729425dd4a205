from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .remote_model import Remote


class InPool:
    """A MODEL that a pool computes. Code that only asks whether a MODEL is one imports nothing of
    pools.
    """

    remote: Remote
