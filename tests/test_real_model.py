"""The masked plain model once more, with SmolLM2 on English text: thirty layers, three query heads a KV head."""

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvcompress as kvc
from kvcompress.rope import rotaries
from kvcompress.texts import builtin_text
from tests.oracle import oracle, recording
from tests.turns import Script, Turn, check_kept


@pytest.mark.parametrize(
    "method",
    [
        "h2o(heavy=24, recent=24)",
        "streaming_llm(sinks=4, window=44)",
        "snapkv(budget=64, window=16) | kivi(bits=2, group_size=16, residual=16)",
    ],
)
def test_logits_and_kept_tokens_are_those_of_the_masked_plain_model(
    method: str, smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]
) -> None:
    model, tokenizer = smollm2
    turns = [Turn(110, None, [1, 1, 8])]
    ids = tokenizer(builtin_text()[20_000:22_000], return_tensors="pt").input_ids[:, :120]
    script = Script(ids, [0], turns)
    with kvc.wrap(model, method) as wrapped, recording(wrapped) as calls:
        cache = wrapped.new_cache()
        script.play(wrapped, cache)
    told = oracle(model, calls, rotaries(model) if wrapped.method.position_mode == "cache" else None)
    assert told.error(calls) < 1e-4
    assert check_kept(wrapped.method, script, calls, cache, told)
