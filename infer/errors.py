"""The exceptions that a caller may want to tell apart; every other bad argument is a ValueError."""


class ConfigError(ValueError):
    """A model or run configuration that cannot work, here or anywhere."""


class WeightFormatError(ValueError):
    """A weight file that is broken, hostile, or of a kind that is not read."""


class RequestError(ValueError):
    """A prompt or a sampling parameter that cannot be served."""


class CapacityError(RuntimeError):
    """The memory or the page pool is too small for what was asked."""
