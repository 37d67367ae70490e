"""What is always true, for every method and composition, over random texts, paddings, chunks and turns."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcompress as kvc
from kvcompress.rope import rotaries
from tests.families import tiny
from tests.oracle import oracle, recording
from tests.turns import METHODS, Script, check_kept, scripts

MODEL = tiny("llama")
TURNING = rotaries(MODEL)
every_method = pytest.mark.parametrize("method", METHODS)


@every_method
@given(script=scripts())
@settings(max_examples=8)
def test_logits_and_kept_tokens_are_those_of_the_masked_plain_model(method: str, script: Script) -> None:
    with kvc.wrap(MODEL, method) as wrapped, recording(wrapped) as calls:
        cache = wrapped.new_cache()
        script.play(wrapped, cache)
    moves = wrapped.method.position_mode == "cache"
    told = oracle(MODEL, calls, script.padding, TURNING if moves else None)
    assert told.error(calls) < 1e-4
    check_kept(wrapped.method, script, calls, cache, told)
