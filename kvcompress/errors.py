"""The errors that a user can cause. Each message names the value, what was expected and what to do."""


class WrapError(ValueError):
    """A model, or a call on a wrapped one, that cannot run over a compressed cache."""


class CacheError(ValueError):
    """A cache used in a way it does not support, or with a model that it was not made for."""
