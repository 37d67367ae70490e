"""One file a method. Every module here is imported, so a new file is all that a new method needs.

What the author of one imports is here too: `from kvcompress.methods import Evicting, LayerView, …`.
"""

import sys
from importlib import import_module
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

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def methods() -> dict[str, type[Method]]:
    """The method classes by the names that their text form uses."""
    return dict(sorted(registry.items()))


class _Callable(ModuleType):
    """This package is reached as `kvcompress.methods` too, and so is the function of that name."""

    def __call__(self) -> dict[str, type[Method]]:
        return methods()


sys.modules[__name__].__class__ = _Callable
