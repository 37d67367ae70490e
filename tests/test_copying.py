"""Copies that are made of a model while it is wrapped."""

import copy
import pickle
from typing import Any

import pytest
import torch

import kvcompress as kvc
from kvcompress import WrapError
from tests.bugs.common import STREAMING, text
from tests.families import OPTIONS, build


def test_a_deep_copy_is_the_plain_model_and_the_model_stays_wrapped() -> None:
    model, ids = build("llama", **OPTIONS["llama"]), text(1, 30)
    with torch.no_grad():
        plain = model(ids).logits
    with kvc.wrap(model, STREAMING) as wrapped:
        expected = wrapped.prefill(ids).logits
        inside: dict[str, Any] = copy.deepcopy({"model": model})
        copied = inside["model"]
        assert torch.equal(wrapped.prefill(ids).logits, expected)
        with torch.no_grad():
            assert torch.equal(copied(ids).logits, plain)
        with kvc.wrap(copied, "exact") as other:
            assert torch.equal(other(ids).logits.argmax(-1), plain.argmax(-1))
    assert vars(copied).keys() == vars(model).keys()
    assert copied.config.to_dict() == model.config.to_dict()


@pytest.mark.parametrize("make", [lambda model: copy.deepcopy(model.model), pickle.dumps])
def test_what_would_stay_wrapped_is_refused(make: Any) -> None:
    model = build("llama", **OPTIONS["llama"])
    with kvc.wrap(model, "exact"), pytest.raises(WrapError, match=r"copied or pickled; copy\.deepcopy\(model\) gives"):
        make(model)
    make(model)
