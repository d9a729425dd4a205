"""Count which messages of a patch have gone through a stage: its receive and its send."""

from __future__ import annotations

from ...errors import ModelError
from ..method import Progress


class MessagesDone:
    """The messages of the patch at hand. ``receives`` and ``sends``: whether the stage has a stage
    before and after it.
    """

    def __init__(self, receives: bool, sends: bool):
        self._receives = receives
        self._sends = sends
        self._run: int | None = None
        self.must_receive = False
        self.must_send = False
        self.is_lost = False  # whether it is not known which message of the link is this patch's

    def begin(self, run: int) -> None:
        """Mark this patch's receive and send as pending. Call before anything that can raise.

        Raises ModelError if messages of a patch of the same run are pending: they are still in the
        link, and this patch would find them.
        """
        if run == self._run and (self.must_receive or self.must_send):
            raise ModelError("A patch before this one failed on its way through the stages: run again.")
        self._run = run
        self.must_receive, self.must_send, self.is_lost = self._receives, self._sends, False

    def receiving(self) -> None:
        """Note that ``received`` follows, unless it fails half way."""
        self.is_lost = True

    def received(self) -> None:
        self.must_receive = self.is_lost = False

    def misread(self) -> None:
        """Take back ``received``: it was another patch's message, and this one's is in the link."""
        self.must_receive, self.is_lost = self._receives, True

    def sent(self) -> None:
        self.must_send = False

    @property
    def progress(self) -> Progress:
        if not (self.must_receive or self.must_send):
            return "all"
        has_received, has_sent = self._receives and not self.must_receive, self._sends and not self.must_send
        return "some" if has_received or has_sent else "none"
