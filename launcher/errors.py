"""The error of the commands and of a pool's start."""


class LaunchError(Exception):
    """A failure the user can mend: one sentence that names the thing and the next move."""
