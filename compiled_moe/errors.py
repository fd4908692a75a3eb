"""What can be wrong with a request at model level; the command line maps each to an exit code."""


class CompiledMoeError(ValueError):
    """Base of everything this package raises for a user's mistake; exit code 2."""


class CheckpointError(CompiledMoeError):
    """A path, file or key that cannot be served as it is."""


class MachineError(CompiledMoeError):
    """Something that the machine lacks: an extra, a device; exit code 3."""
