"""KV sizes against worked values, and against what real models' caches hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import kvcompress as kvc
from kvcompress.prefix.layer_sizes import LayerSize, UnknownLayer
from kvcompress.prefix.sizes import KVSize, MethodSize, kv_size, token_passes
from tests.tiny import tiny_llama

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sizes.json").read_text())
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 128,
}
WINDOW = 8
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LATENT = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 4,
    "q_lora_rank": None,
}
DELTA = {
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
MIXED = ["linear_attention", "full_attention"] * 2
SLIDING = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "gpt2": {"num_key_value_heads": None},
    "gpt_neox": {"num_key_value_heads": None},
    "gpt_bigcode": {"multi_query": True, "num_key_value_heads": None},
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "head_dim": 8},
    "llama4_text": {"attention_chunk_size": WINDOW, "head_dim": 8, "intermediate_size_mlp": 32, **EXPERTS},
    "deepseek_v3": {**LATENT, "n_routed_experts": 2, "n_group": 1, "topk_group": 1},
    "gemma3n_text": {
        "sliding_window": WINDOW,
        "head_dim": 8,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "laurel_rank": 4,
        "layer_types": SLIDING,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": {
        "sliding_window": WINDOW,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "layer_types": SLIDING,
    },
    "qwen3_next": {"head_dim": 8, "shared_expert_intermediate_size": 16, **DELTA, **EXPERTS},
    "olmo_hybrid": DELTA,
    "kimi_linear": {**LATENT, **EXPERTS, "linear_head_dim": 4, "linear_num_heads": 4, "layer_types": MIXED},
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 2},
    "bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
        "mamba_n_groups": 2,
        "attn_layer_indices": [1],
    },
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 4, "mamba_d_ssm": 32, "mamba_d_state": 4, "head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
    "minimax": {"head_dim": 8, "layer_types": MIXED, **EXPERTS},
}


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **{**COMMON, **FAMILIES.get(family, {}), **changes})


def cached_bytes(model: PreTrainedModel, tokens: int, batch: int) -> int:
    """Bytes of the tensors in the cache that the model itself makes and fills."""
    with torch.no_grad():
        out = model(torch.randint(3, 60, (batch, tokens)), use_cache=True)
    cache = next(out[key] for key in ("cache", "past_key_values", "cache_params") if out.get(key) is not None)
    tensors: list[torch.Tensor] = [each for each in getattr(cache, "linear_cache", []) if len(each)]
    for layer in cache.layers:
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            held = getattr(layer, name, None)
            tensors += [each for each in (held.values() if isinstance(held, dict) else [held]) if each is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_size_is_what_the_models_own_cache_holds(family: str) -> None:
    """In bfloat16, so that what is kept in float32 shows; below, at and past the window."""
    config = config_of(family)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    size = kv_size(config, "bfloat16")
    for tokens in (5, WINDOW, 20):
        assert size.bytes_at(tokens, batch=2) == cached_bytes(model, tokens, batch=2), tokens


@pytest.mark.parametrize("name", ["7b_mha_fp16", "8b_gqa_fp16"])
def test_llama_sizes_are_the_worked_ones(name: str) -> None:
    worked = GOLDEN[name]
    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=worked["layers"],
        num_attention_heads=32,
        num_key_value_heads=worked["kv_heads"],
        head_dim=worked["head_dim"],
    )
    size = kv_size(config, "float16")
    assert size.bytes_per_token == worked["per_token"]
    assert size.attention == ("MHA" if "mha" in name else "GQA")


def test_other_sizes_are_the_worked_ones() -> None:
    assert kv_size(AutoConfig.for_model("gpt2")).values_per_token == GOLDEN["gpt2_small_values_per_token"]
    worked = GOLDEN["qwen2.5_1.5b"]
    shape = {
        "num_hidden_layers": worked["layers"],
        "num_attention_heads": worked["q_heads"],
        "hidden_size": worked["q_heads"] * worked["head_dim"],
    }
    size = kv_size(AutoConfig.for_model("qwen2", num_key_value_heads=worked["kv_heads"], **shape), torch.float16)
    assert size.values_per_token == worked["values_per_token"]
    assert size.bytes_at(32_768) == worked["bytes_at_32768_fp16"]
    all_heads = kv_size(AutoConfig.for_model("qwen2", num_key_value_heads=worked["q_heads"], **shape))
    assert all_heads.values_per_token == worked["values_per_token_if_mha"]
    small = GOLDEN["smollm2_135m"]
    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=small["layers"],
        num_attention_heads=9,
        num_key_value_heads=small["kv_heads"],
        hidden_size=9 * small["head_dim"],
    )
    assert kv_size(config).values_per_token == small["values_per_token"]
    assert kv_size(config, "float32").bytes_per_token == small["fp32_bytes_per_token"]


def test_the_built_in_model_has_the_worked_size(smollm2) -> None:
    assert kv_size(smollm2[0].config).values_per_token == GOLDEN["smollm2_135m"]["values_per_token"]


def test_token_passes_are_the_worked_ones() -> None:
    worked = GOLDEN["token_passes"]
    assert token_passes(worked["prompt"], worked["new"]) == (worked["without_cache"], worked["with_cache"])


def test_attention_kinds_are_named() -> None:
    kinds = {"gpt2": "MHA", "gpt_bigcode": "MQA", "llama": "GQA", "deepseek_v3": "MLA", "mamba": "none"}
    assert {family: kv_size(config_of(family)).attention for family in kinds} == kinds


@given(
    st.lists(
        st.builds(
            LayerSize,
            kind=st.just("full"),
            heads=st.integers(0, 2),
            key_dim=st.integers(1, 3),
            value_dim=st.integers(1, 3),
            window=st.none() | st.integers(0, 6),
            state=st.integers(0, 5),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 400),
    st.integers(1, 3),
)
def test_what_fits_is_the_most_that_fits(layers: list[LayerSize], budget: int, batch: int) -> None:
    size = KVSize("made", "MHA", "float16", 2, tuple(layers))
    longest = size.tokens_within(budget, batch)
    if longest is None:
        assert size.bytes_at(10**9, batch) <= budget
    else:
        assert longest == 0 or size.bytes_at(longest, batch) <= budget
        assert size.bytes_at(longest + 1, batch) > budget
    users = MethodSize(size, "exact").users_within(budget, 5)
    if users is None:
        assert size.bytes_at(5) == 0
    else:
        assert users * size.bytes_at(5) <= budget < (users + 1) * size.bytes_at(5)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("t5", {}, "t5: an encoder-decoder model"),
        ("bert", {}, "bert: an encoder"),
        ("rwkv", {}, "rwkv: it keeps a recurrent state of its own form"),
        ("recurrent_gemma", {}, r"recurrent_gemma, layer 0 \('(linear_attention|recurrent)'\)"),
        ("mistral", {"layer_types": ["window_attention"] * 32}, r"mistral, layer 0 \('window_attention'\)"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"] * 16}, "layer 1 .*has no sliding_window"),
        ("llama", {"layer_types": ["full_attention"]}, "llama: 1 layer types for 32 layers"),
    ],
)
def test_an_unknown_layer_is_named(family: str, changes: dict, message: str) -> None:
    config = AutoConfig.for_model(family)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(UnknownLayer, match=message):
        kv_size(config)


def test_bad_arguments_are_named() -> None:
    config = config_of("llama")
    with pytest.raises(ValueError, match="dtype 'float13'"):
        kv_size(config, "float13")
    with pytest.raises(ValueError, match="batch=0"):
        kv_size(config).bytes_at(5, batch=0)
    with pytest.raises(ValueError, match="unknown method 'h3o'; did you mean 'h2o'"):
        MethodSize(kv_size(config), "h3o()").bytes_at(5)


@pytest.mark.parametrize(
    "method",
    [
        "exact",
        "streaming_llm(sinks=2, window=40)",
        "h2o(heavy=0.2, recent=0.3)",
        "snapkv(budget=0.4, window=8)",
        "snapkv(budget='20KiB', window=8)",
        "kivi(group_size=8, residual=16)",
        "snapkv(budget=0.5, window=8) | kivi(bits=4, group_size=8, residual=16)",
    ],
)
@pytest.mark.parametrize("context", [5, 97])
def test_bytes_under_a_method_are_what_a_real_cache_stores(method: str, context: int) -> None:
    model = tiny_llama()
    ids = torch.randint(0, 256, (2, context), generator=torch.Generator().manual_seed(0))
    with kvc.wrap(model, method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids, cache=cache)
        stored = cache.nbytes - cache.memory()["spare"]
    assert MethodSize(kv_size(model.config, "float32"), method).bytes_at(context, batch=2) == stored


UNEVEN = [
    "kivi(bits=2, group_size=8, residual=16)",
    "streaming_llm(sinks=3, window=40) | kivi(bits=2, group_size=8, residual=16)",
    "snapkv(budget=0.37, window=8) | kivi(bits=4, group_size=8, residual=16)",
    "h2o(heavy=0.2, recent=0.3) | kivi(bits=2, group_size=8, residual=16)",
    "h2o(heavy=0.2, recent=0.3)",
    "streaming_llm(sinks=2, window=60)",
    "snapkv(budget='12KiB', window=8) | kivi(bits=2, group_size=8, residual=16)",
]


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("method", UNEVEN)
def test_the_longest_context_that_fits_is_found_where_bytes_fall(method: str, sliding: bool) -> None:
    """Against all contexts one by one; a limit is every size that some context has, and one byte less."""
    changes = {"head_dim": 8, "sliding_window": WINDOW} if sliding else {"head_dim": 16}
    under = MethodSize(kv_size(config_of("gemma2" if sliding else "llama", **changes), "float32"), method)
    sizes = [under.bytes_at(context, batch=2) for context in range(1, 400)]
    own = under.method.byte_budget or 0
    for limit in {size - less for size in sizes[:120:7] for less in (0, 1)}:
        fitting = [context for context, size in enumerate(sizes, start=1) if size <= limit]
        longest = under.tokens_within(limit, batch=2)
        if longest is None:
            assert fitting[-1] == 399
        elif longest < 350 and own <= limit:
            assert longest == max(fitting, default=0)
        elif longest:
            assert under.bytes_at(longest, batch=2) <= limit


def test_the_worked_contexts_that_fit() -> None:
    """Of SmolLM2's size in float32: fewer bytes at 768 tokens than at 663, and no limit where a window is full."""
    small = GOLDEN["smollm2_135m"]
    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=small["layers"],
        num_attention_heads=9,
        num_key_value_heads=small["kv_heads"],
        hidden_size=9 * small["head_dim"],
    )
    size, limit = kv_size(config, "float32"), 6_000_000
    assert MethodSize(size, "streaming_llm(sinks=4, window=256) | kivi(bits=2)").tokens_within(limit) is None
    kivi = MethodSize(size, "kivi(bits=2)")
    assert kivi.bytes_at(768) == 5_990_400
    longest = kivi.tokens_within(limit)
    assert longest == max(context for context in range(1, 2000) if kivi.bytes_at(context) <= limit) >= 768


def test_sliding_layers_alone_have_no_limit() -> None:
    size = kv_size(config_of("mistral", sliding_window=WINDOW), "float32")
    for method in (
        "exact",
        "h2o(budget='20KiB')",
        "snapkv(budget='20KiB', window=4)",
        "kivi(group_size=8, residual=8)",
    ):
        under = MethodSize(size, method)
        assert under.tokens_within(under.bytes_at(1000)) is None
        assert under.tokens_within(0) == 0


@pytest.mark.parametrize("context", [7, 90])
def test_users_share_a_byte_budget(context: int) -> None:
    """The budget is the whole cache's, so users fit as long as each has a token; else each brings bytes of its own."""
    size = kv_size(config_of("llama", head_dim=16), "float32")
    shared = MethodSize(size, "h2o(budget='20KiB')")
    users = shared.users_within(50_000, context)
    assert users is not None
    assert shared.bytes_at(context, users) <= 20 * 1024
    with pytest.raises(ValueError, match="does not hold one token"):
        shared.bytes_at(context, users + 1)
    own = MethodSize(size, "h2o(heavy=9, recent=9)")
    assert own.users_within(50_000, context) == 50_000 // own.bytes_at(context)


ENCODERS = [
    "modernbert",
    "clip",
    "clip_text_model",
    "wav2vec2",
    "swin",
    "albert",
    "vit",
    "distilbert",
    "lxmert",
    "fnet",
]


@pytest.mark.parametrize("family", ENCODERS)
def test_what_generates_no_text_has_no_kv_size(family: str) -> None:
    with pytest.raises(UnknownLayer, match="no model of it that generates text"):
        kv_size(AutoConfig.for_model(family))


def test_the_text_part_of_a_model_of_images_has_the_size_of_the_whole() -> None:
    whole = AutoConfig.for_model("qwen3_vl")
    assert kv_size(whole) == kv_size(whole.text_config)
    assert kv_size(whole).attention == "MHA"


def test_code_that_comes_with_a_model_has_a_size() -> None:
    class OwnConfig(PreTrainedConfig):
        model_type = "own"
        num_hidden_layers = 2
        hidden_size = 64
        num_attention_heads = 4

    with pytest.raises(UnknownLayer, match="own: transformers has no model"):
        kv_size(OwnConfig())
    options: dict[str, Any] = {"auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}}
    assert kv_size(OwnConfig(**options)).values_per_token == 256


def test_a_method_that_does_not_fit_has_no_size() -> None:
    config = tiny_llama().config
    for method in ("kivi(group_size=12, residual=24)", "snapkv(budget=64) | kivi(group_size=12, residual=24)"):
        with pytest.raises(ValueError, match="group_size 12 does not divide the model's head dim 16"):
            MethodSize(kv_size(config), method)
