"""A method that fits every model and fails as soon as it should evict, as a user's own may."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from torch import Tensor

from kvcompress.methods import Budget, Evicting, LayerView
from kvcompress.methods.base import registry

BREAKING = "breaking(budget=0.5)"


@pytest.fixture
def breaking() -> Iterator[str]:
    """The text form of the method, known while the test runs."""

    @dataclass(frozen=True)
    class Breaking(Evicting):
        budget: Budget

        name = "breaking"
        acts = "every_call"

        def keep(self, layer: LayerView) -> Tensor:
            raise ValueError("this method breaks")

    yield BREAKING
    registry.pop(Breaking.name)
