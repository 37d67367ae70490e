"""One file a method. Every module here is imported, so a new file is all that a new method needs.

Methods of other packages are known too, once these name them: an entry point of the group `kvcompress.methods` that
leads to the class, or to a module that defines some.

What the author of one imports is here too: `from kvcompress.methods import Evicting, LayerView, …`.
"""

import sys
import warnings
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from types import ModuleType

from kvcompress.budget import Budget, check_budget
from kvcompress.methods.base import Acts, Ends, Evicting, Kept, Method, PositionMode, registry
from kvcompress.methods.packing import Packing
from kvcompress.methods.view import LayerView

__all__ = [
    "Acts",
    "Budget",
    "Ends",
    "Evicting",
    "Kept",
    "LayerView",
    "Method",
    "Packing",
    "PositionMode",
    "check_budget",
    "methods",
]

GROUP = "kvcompress.methods"

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def _load_others() -> None:
    """Imports what installed packages name; one that cannot be imported is named in a warning and left out."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            package = point.dist.name if point.dist else "a package"
            warnings.warn(
                f"the methods that {package} names as {point.value!r} cannot be imported "
                f"({type(error).__name__}: {error}); update or remove that package",
                stacklevel=2,
            )


_load_others()


def methods() -> dict[str, type[Method]]:
    """The method classes by the names that their text form uses."""
    return dict(sorted(registry.items()))


class _Callable(ModuleType):
    """This package is reached as `kvcompress.methods` too, and so is the function of that name."""

    def __call__(self) -> dict[str, type[Method]]:
        return methods()


sys.modules[__name__].__class__ = _Callable
