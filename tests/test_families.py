"""Every supported family under every method: logits, kept tokens, padding, generation; and those that are refused."""

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

import kvcompress as kvc
from kvcompress.rope import rotaries
from tests.choices import check_everything_kept, check_h2o, check_snapkv, check_streaming
from tests.families import FAMILIES, OPTIONS, VOCABULARY, WITHOUT_ROTARY, build, tiny
from tests.oracle import Call, Oracle, oracle, recording
from tests.turns import METHODS as METHODS_OF_ANY_TEXT
from tests.turns import Script, check_kept, scripts

SNAPKV = "snapkv(budget=14, window=4, kernel=3)"
KIVI = "kivi(bits=2, group_size=8, residual=8)"
METHODS = [
    "exact",
    "streaming_llm(sinks=2, window=12, positions='original')",
    "streaming_llm(sinks=2, window=12)",
    "h2o(heavy=7, recent=7)",
    SNAPKV,
    KIVI,
    f"{SNAPKV} | {KIVI}",
]
PADDING = [0, 5]
PROMPT = 31
FIRST_CHUNK = 17
LATER_CALLS = (1, 6, 1)


def moves_keys(method: str) -> bool:
    return kvc.parse(method).position_mode == "cache"


def rows_for(family: str) -> list[tuple[str, str]]:
    return [(family, method) for method in METHODS if not (family in WITHOUT_ROTARY and moves_keys(method))]


pairs = pytest.mark.parametrize(("family", "method"), [pair for family in FAMILIES for pair in rows_for(family)])


@cache
def text(columns: int = PROMPT + sum(LATER_CALLS)) -> Tensor:
    """Two rows of ids, the second behind padding."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, VOCABULARY, (2, columns), generator=generator)


def padding_mask(columns: int) -> Tensor:
    return (torch.arange(columns) >= torch.tensor(PADDING)[:, None]).long()


@dataclass
class Run:
    """A padded batch prefilled in two chunks, then fed three more calls; and the masked plain model's answer."""

    cache: kvc.CompressedCache
    calls: list[Call]
    expected: Oracle


def run(model: PreTrainedModel, method: str) -> Run:
    ids = text()
    with kvc.wrap(model, method) as wrapped, recording(wrapped) as calls:
        cache = wrapped.new_cache()
        mask = padding_mask(PROMPT)
        wrapped.prefill(ids[:, :PROMPT], attention_mask=mask, cache=cache, chunk=FIRST_CHUNK)
        for part in ids[:, PROMPT:].split(LATER_CALLS, 1):
            wrapped(part, cache=cache)
    turning = rotaries(model) if moves_keys(method) else None
    return Run(cache, calls, oracle(model, calls, turning))


@pairs
def test_logits_and_kept_tokens_are_those_of_the_masked_plain_model(family: str, method: str) -> None:
    done = run(tiny(family), method)
    assert done.expected.error(done.calls) < (1e-5 if method == "exact" else 1e-4)
    told = (done.expected, done.calls, done.cache)
    if method.startswith("streaming"):
        assert check_streaming(*told, sinks=[[2, 2]] * 5, window=[[12, 12]] * 5)
    elif method.startswith("h2o"):
        assert check_h2o(*told, heavy=[[7, 7]] * 5, recent=[[7, 7]] * 5)
    elif method.startswith("snapkv"):
        assert check_snapkv(*told, prompts=[(0, 1)], budgets=[[14, 14]], window=4, kernel=3, pooling="max")
    else:
        check_everything_kept(*told)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gemma3_text", "smollm3", "gpt_oss", "llama4_text"])
@given(method=st.sampled_from([method for method in METHODS_OF_ANY_TEXT if "kB" not in method]), script=scripts())
@settings(max_examples=4)
def test_any_text_in_families_with_layers_of_several_kinds(family: str, method: str, script: Script) -> None:
    model = tiny(family)
    with kvc.wrap(model, method) as wrapped, recording(wrapped) as calls:
        cache = wrapped.new_cache()
        script.play(wrapped, cache)
    told = oracle(model, calls, rotaries(model) if moves_keys(method) else None)
    assert told.error(calls) < 1e-4
    check_kept(wrapped.method, script, calls, cache, told)
    assert cache.nbytes == sum(cache.memory().values())


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_equals_the_plain_model_whatever_the_calls(family: str) -> None:
    model, ids = tiny(family), text()
    mask = padding_mask(ids.shape[1])
    real = mask.bool()
    with torch.no_grad():
        plain = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    for split in ([39], [6, 33], [9, 17, 1, 12], [11] * 3 + [1] * 6):
        with kvc.wrap(model, "exact") as wrapped:
            cache = wrapped.new_cache()
            logits = [
                wrapped(part, cache=cache, attention_mask=part_mask).logits
                for part, part_mask in zip(ids.split(split, 1), mask.split(split, 1), strict=True)
            ]
        error = (torch.cat(logits, 1) - plain)[real].abs().max() / plain[real].abs().max()
        assert error < 1e-5, (split, float(error))
    with torch.no_grad():
        again = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    assert torch.equal(again, plain)


@pairs
def test_a_padded_row_generates_what_it_generates_alone(family: str, method: str) -> None:
    model, ids = tiny(family), text(23)
    mask = padding_mask(23)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with kvc.wrap(model, method) as wrapped:
        together = wrapped.generate(ids, attention_mask=mask, **options)
        batch = wrapped.cache
        for row, padding in enumerate(PADDING):
            alone = wrapped.generate(ids[row : row + 1, padding:], **options)
            assert torch.equal(together[row, padding:], alone[0])
            assert batch.seen[row] == wrapped.cache.seen[0] == 23 - padding + 3
            for layer in range(len(batch.layers)):
                kept = batch.kept(layer)[row]
                assert torch.equal(kept[:, (kept >= 0).any(0)], wrapped.cache.kept(layer)[0])


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("falcon", {}, "never calls transformers' attention interface"),
        ("bloom", {}, "never calls transformers' attention interface"),
        ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "never calls transformers' attention interface"),
        (
            "deepseek_v3",
            {
                "kv_lora_rank": 16,
                "q_lora_rank": None,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 16,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
                "moe_intermediate_size": 16,
                "intermediate_size": 32,
            },
            "latent keys and values",
        ),
    ],
)
def test_what_cannot_run_over_a_compressed_cache_is_refused(
    model_type: str, options: dict[str, Any], reason: str
) -> None:
    common = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = build(model_type, **common, **options)
    with pytest.raises(kvc.WrapError, match=reason):
        kvc.wrap(model, "exact")


def test_a_model_with_sliding_layers_alone_warns_that_nothing_is_compressed() -> None:
    model = build("mistral", **OPTIONS["mistral"] | {"sliding_window": 9})
    with pytest.warns(UserWarning, match="changes nothing"):
        kvc.wrap(model, "h2o(heavy=4, recent=4)")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvc.wrap(model, "exact")
