"""Errors a user meets. One sentence each: the thing, the numbers, the next move."""


class PipeMeshError(RuntimeError):
    """Base of everything the pack raises on purpose. ComfyUI shows the module before the sentence,
    and it imports the pack under the path of its folder.
    """

    __module__ = "pipemesh"

    def __init_subclass__(cls) -> None:
        cls.__module__ = PipeMeshError.__module__


class LayoutError(PipeMeshError, ValueError):
    """Degrees that do not fit the devices; the message prints the equation that fails."""


class Refused(PipeMeshError):
    """A setting that cannot be honoured in parallel (an in-block patch, a model without a plan), by
    name.
    """


class NoRoom(Refused):
    """Memory that a run will need is not free."""


class ModelError(PipeMeshError):
    """A model or an input that ranks rejected; the pool stays usable, unless this is PoolSpent."""


class OutOfMemory(ModelError):
    """A model that did not fit the ranks; the pool stays usable, unless this is PoolSpent."""


class PoolSpent(OutOfMemory):
    """Some ranks ran out of memory while others waited for them: the pool is gone. The same
    evaluation may be computed again, in a fresh pool that leaves more memory free.
    """

    ENDED = " The workers were ended, and the next run starts fresh ones."


class PoolFailed(PipeMeshError):
    """A rank died, hung, or failed while others waited for it; the pool is gone and the next run
    starts a fresh one.
    """


class SharedMemoryFull(PipeMeshError):
    """The system has no room for a shared-memory segment."""


class RunCancelled(PipeMeshError):
    """The user pressed cancel; the pool stays warm."""
