"""Auto mode: whether it is on, and its place in ComfyUI. It is there from the start of ComfyUI on;
the objects that sample in the pool are made for the first sampling that may need them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...parallel_runtime.client.pool_marker import InPool
from ...parallel_runtime.texts import Text
from ...pool.devices import no_ranks_on
from ..first_use import Once
from ..local_devices import own_device
from ..notices import Notices
from ..timing import StepTimes
from .seam import GuiderSeam, HostChanged, StockCall, UpscalerSeam, VAESeam
from .switch import Switch

if TYPE_CHECKING:
    from ..runtime import Runtime
    from .decoding import PoolDecoding
    from .sampling import PoolSampling

UNUSABLE = "[PipeMesh] The pool cannot be used in this ComfyUI:"
log = logging.getLogger("pipemesh")


class Auto:
    def __init__(
        self,
        runtime: Callable[[], Runtime],
        switch: Switch,
        notices: Notices,
        times: StepTimes | None = None,
    ):
        self.switch = switch
        self._why_not = ""  # this ComfyUI is none that auto mode knows, or computes where no rank does
        self._runtime = runtime
        self._notices = notices
        self._times = times or StepTimes()
        self._has_been_on = False
        self._sampling = Once(self._make_sampling)
        self._decoding = Once(self._make_decoding)
        self._seam = GuiderSeam(self.sample, self.unseen, self._times)
        note = self._times.prompts.note_vae
        self._others = {
            "VAEs": VAESeam(self._use, note),
            "Upscale models": UpscalerSeam(self._use, note),
        }

    def is_on(self) -> bool:
        return not self._why_not and self.switch.is_on()

    @property
    def unavailable(self) -> Text | None:
        """Returns why the setting has no effect; None if it has an effect."""
        return Text("unavailable_host", (self._why_not,)) if self._why_not else self.switch.overruled

    def install(self) -> None:
        """Takes its place in ComfyUI. Pools of the CPU whose layout is open need that on any
        device.
        """
        self._why_not = no_ranks_on(own_device())
        try:
            self._seam.install()
        except HostChanged as error:
            self._why_not = str(error)
        for what, seam in self._others.items():
            try:
                seam.install()
            except HostChanged as error:
                log.info("[PipeMesh] ComfyUI itself computes %s. %s", what, error)
        if self._why_not and self.switch.is_on():
            self._notices.tell(self._why_not, one_gpu=False)
        elif self._why_not:
            log.info("[PipeMesh] %s", self._why_not)

    def remove(self) -> None:
        self._seam.remove()
        for seam in self._others.values():
            seam.remove()

    def sample(self, guider: Any, run: StockCall) -> Any:
        """Hands a guider's sampling to the pool. Stock ComfyUI samples alone if the switch was off
        from the start and no node of PipeMesh has parallelized a MODEL of this guider.
        """
        is_on = self._is_on_now()
        is_parallel = any(isinstance(value, InPool) for value in vars(guider).values())
        if not self._has_been_on and not is_parallel:
            return run()
        try:
            in_pool = self._sampling()
        except Exception as error:  # noqa: BLE001 - a graph that works without PipeMesh works with it
            log.warning(UNUSABLE, exc_info=error)
            self._notices.tell(f"On one GPU: {type(error).__name__}: {error}")
            return run()
        return in_pool.sample(guider, run, is_on=is_on)

    def _use(self, used: Any, work: str, given: Any, call: Callable[[Any], Any]) -> Any:
        """Hands the ``work`` of a VAE or an upscale model to a pool that is up, if that is worth
        it.
        """
        is_on = self._is_on_now()
        if not self._has_been_on:
            return call(used)
        try:
            in_pool = self._decoding()
        except Exception as error:  # noqa: BLE001 - a graph that works without PipeMesh works with it
            log.warning(UNUSABLE, exc_info=error)
            return call(used)
        return in_pool.use(used, work, given, call, is_on=is_on)

    def _is_on_now(self) -> bool:
        is_on = self.switch.is_on()
        self._has_been_on |= is_on
        return is_on

    def unseen(self, guider: Any) -> None:
        """Tells of a guider whose class samples without ``CFGGuider.sample``."""
        if self.switch.is_on() and not isinstance(guider.model_patcher, InPool):
            self._notices.tell(
                f"On one GPU: {type(guider).__name__} has a sample method of its own, which PipeMesh does not"
                " know."
            )

    def _make_sampling(self) -> PoolSampling:
        from .sampling import PoolSampling

        return PoolSampling(self._runtime(), self._notices, self._times)

    def _make_decoding(self) -> PoolDecoding:
        from .decoding import PoolDecoding

        return PoolDecoding(self._runtime(), self._notices)
