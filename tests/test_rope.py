"""Re-rotation against complex numbers, a golden file and the models' own keys at shifted positions."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import cpu_offload
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from kvcompress.compat import cache_argument
from kvcompress.rope import Rotary, RotaryError, rotaries

GOLDEN = Path(__file__).parent / "golden" / "streaming_llm.json"


def frequencies(pairs: int, base: float = 10_000.0) -> Tensor:
    return base ** -(torch.arange(pairs, dtype=torch.float64) / pairs)


@st.composite
def rotations(draw: st.DrawFn) -> tuple[Rotary, Tensor]:
    """A rotary of any layout and fp64 keys [B, H, S, D] for it."""
    pairs = draw(st.integers(1, 6))
    direction = draw(st.sampled_from([1, -1]))
    rotary = Rotary(direction * frequencies(pairs), interleaved=draw(st.booleans()))
    shape = [draw(st.integers(1, 3)) for _ in range(3)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dims = 2 * pairs + draw(st.integers(0, 5))
    return rotary, torch.randn(*shape, dims, generator=generator, dtype=torch.float64)


distances = st.integers(-1_000_000, 1_000_000)


def complex_oracle(rotary: Rotary, keys: Tensor, delta: np.ndarray) -> np.ndarray:
    """Each pair as one complex number times exp(i delta f), in double precision."""
    result = keys.double().numpy().copy()
    frequency = rotary.inv_freq.double().numpy()
    pairs = len(frequency)
    first = np.arange(pairs) * 2 if rotary.interleaved else np.arange(pairs)
    second = first + (1 if rotary.interleaved else pairs)
    turned = (result[..., first] + 1j * result[..., second]) * np.exp(1j * delta[..., None] * frequency)
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


@given(rotations(), st.data())
@settings(deadline=None, max_examples=60)
def test_rotate_equals_complex_multiplication_for_each_key_its_own_distance(
    rotation: tuple[Rotary, Tensor], data: st.DataObject
) -> None:
    rotary, keys = rotation
    b, h, s = keys.shape[:3]
    shape = data.draw(st.sampled_from([(b, h, s), (b, 1, 1), (h, s), (s,), (1, h, 1), ()]))
    delta = torch.tensor(
        data.draw(st.lists(distances, min_size=math.prod(shape), max_size=math.prod(shape))), dtype=torch.int64
    ).reshape(shape)
    expected = complex_oracle(rotary, keys, np.broadcast_to(delta.numpy(), keys.shape[:3]))
    np.testing.assert_allclose(rotary.rotate(keys, delta).numpy(), expected, atol=1e-8)
    np.testing.assert_allclose(rotary.rotate(keys.float(), delta.int()).numpy(), expected, atol=4e-6)


@given(rotations(), distances)
@settings(deadline=None, max_examples=40)
def test_one_distance_for_all_keys_is_the_same_as_a_tensor_of_it(rotation: tuple[Rotary, Tensor], delta: int) -> None:
    rotary, keys = rotation
    before = keys.clone()
    rotated = rotary.rotate(keys, delta)
    assert torch.equal(rotated, rotary.rotate(keys, torch.full(keys.shape[:3], delta)))
    assert torch.equal(keys, before)
    rest = 2 * len(rotary.inv_freq)
    assert torch.equal(rotated[..., rest:], keys[..., rest:])


@given(rotations(), distances, distances)
@settings(deadline=None, max_examples=40)
def test_two_rotations_add_up(rotation: tuple[Rotary, Tensor], a: int, b: int) -> None:
    rotary, keys = rotation
    torch.testing.assert_close(rotary.rotate(rotary.rotate(keys, a), b), rotary.rotate(keys, a + b), rtol=0, atol=1e-12)
    single = keys.float()
    torch.testing.assert_close(
        rotary.rotate(rotary.rotate(single, a), b), rotary.rotate(single, a + b), rtol=0, atol=1e-5
    )


@given(rotations(), distances)
@settings(deadline=None, max_examples=40)
def test_length_is_kept(rotation: tuple[Rotary, Tensor], delta: int) -> None:
    rotary, keys = rotation
    torch.testing.assert_close(rotary.rotate(keys, delta).norm(dim=-1), keys.norm(dim=-1), rtol=1e-12, atol=0)


@given(rotations(), st.integers(0, 500_000), st.integers(0, 500_000), st.integers(-400_000, 400_000))
@settings(deadline=None, max_examples=40)
def test_scores_depend_on_the_distance_alone(
    rotation: tuple[Rotary, Tensor], query_at: int, key_at: int, shift: int
) -> None:
    rotary, keys = rotation
    queries = keys.flip(-1, 0)

    def scores(shift: int) -> Tensor:
        return rotary.rotate(queries, query_at + shift) @ rotary.rotate(keys, key_at + shift).mT

    torch.testing.assert_close(scores(shift), scores(0), rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotating_by_zero_keeps_every_bit(dtype: torch.dtype, interleaved: bool) -> None:
    rotary = Rotary(frequencies(4), interleaved)
    keys = torch.randn(2, 3, 5, 10, generator=torch.Generator().manual_seed(1)).to(dtype)
    keys[0, 0] = -0.0  # times a sine of zero it would lose its sign
    moved = torch.tensor([0, 0, 7, 0, -3])
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[keys.element_size()]
    assert torch.equal(rotary.rotate(keys, 0).view(bits), keys.view(bits))
    rotated = rotary.rotate(keys, moved)
    assert torch.equal(rotated[:, :, moved == 0].view(bits), keys[:, :, moved == 0].view(bits))
    assert (rotated[1, :, moved != 0] != keys[1, :, moved != 0]).any(-1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keys_are_rotated_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    rotary = Rotary(frequencies(8))
    keys = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    delta = torch.arange(64) * 15_000
    expected = complex_oracle(rotary, keys, np.broadcast_to(delta.numpy(), (1, 2, 64)))
    rotated = rotary.rotate(keys, delta)
    assert rotated.dtype == dtype
    # fp64 rounded to half; where the exact value lies at a rounding boundary, the next half is as good
    ulp = torch.finfo(dtype).eps
    np.testing.assert_allclose(rotated.double().numpy(), expected, rtol=ulp / 2 + 1e-4 * ulp, atol=2e-6)


def test_a_view_of_keys_is_left_alone() -> None:
    rotary = Rotary(frequencies(2))
    stored = torch.randn(1, 1, 3, 4).expand(2, 2, 3, 4)  # rows share memory
    rotated = rotary.rotate(stored, torch.tensor([1, 2])[:, None, None])
    for row, delta in enumerate((1, 2)):
        torch.testing.assert_close(rotated[row : row + 1], rotary.rotate(stored[:1], delta), rtol=0, atol=0)


def test_golden_streaming_llm_logits() -> None:
    golden = json.loads(GOLDEN.read_text())
    rotary = Rotary(torch.tensor([1.0]))
    attended = torch.tensor(golden["steps"][9]["attended"])
    raw = torch.tensor([1.0, 0.0])
    stored = rotary.rotate(raw.expand(1, 1, len(attended), 2), attended)  # as the model's cache holds them

    def logits(keys: Tensor, query_position: int) -> Tensor:
        query = rotary.rotate(raw.expand(1, 1, 1, 2), query_position)
        return (query @ keys.mT).flatten() / math.sqrt(2)

    original = torch.tensor(golden["logits_token9_positions_original"])
    torch.testing.assert_close(logits(stored, 9), original, rtol=0, atol=2e-6)

    slots = torch.tensor(golden["key_positions_token9_positions_cache"])
    moved = rotary.rotate(stored, slots - attended)
    in_cache = torch.tensor(golden["logits_token9_positions_cache"])
    query_position = golden["query_position_token9_positions_cache"]
    torch.testing.assert_close(logits(moved, query_position), in_cache, rtol=0, atol=2e-6)


def test_misuse_is_named() -> None:
    rotary = Rotary(frequencies(4))
    keys = torch.zeros(2, 3, 5, 8)
    with pytest.raises(TypeError, match=r"torch\.float32, expected whole positions"):
        rotary.rotate(keys, torch.ones(5))
    with pytest.raises(TypeError, match=r"delta is 1\.5, expected whole positions"):
        rotary.rotate(keys, 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(4,\) does not broadcast to \(2, 3, 5\)"):
        rotary.rotate(keys, torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"\(7, 2, 3, 5\) does not broadcast"):
        rotary.rotate(keys, torch.ones(7, 2, 3, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="6 dims a head, but this rotary turns 8"):
        rotary.rotate(keys[..., :6], 1)


TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FULL = [8, 8, 8]  # rotary pairs of each layer of 16 dims a head


def scaled(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


YARN = scaled("yarn", factor=8.0, original_max_position_embeddings=64)
LLAMA3 = scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)

# name: (config class, its settings, rotary pairs of each layer (0 for none), interleaved)
FAMILIES: dict[str, tuple[str, dict[str, Any], list[int], bool]] = {
    "llama": ("LlamaConfig", {}, FULL, False),
    "llama linear": ("LlamaConfig", scaled("linear", factor=8.0), FULL, False),
    "llama llama3": ("LlamaConfig", LLAMA3, FULL, False),
    "llama yarn": ("LlamaConfig", YARN, FULL, False),
    "mistral": ("MistralConfig", {}, FULL, False),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}, FULL, False),
    "qwen2": ("Qwen2Config", {}, FULL, False),
    "qwen3": ("Qwen3Config", {"head_dim": 16}, FULL, False),
    "phi": ("PhiConfig", {}, [4, 4, 4], False),
    "phi3": ("Phi3Config", {}, FULL, False),
    "gemma2": ("Gemma2Config", {"head_dim": 16}, FULL, False),
    "gemma3_text": (
        "Gemma3TextConfig",
        {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        FULL,
        False,
    ),
    "gpt_neox": ("GPTNeoXConfig", {}, [2, 2, 2], False),
    "olmo2": ("Olmo2Config", {}, FULL, False),
    "stablelm": ("StableLmConfig", {}, [2, 2, 2], False),
    "granite": ("GraniteConfig", {}, FULL, False),
    "cohere": ("CohereConfig", {}, FULL, True),
    "starcoder2": ("Starcoder2Config", {}, FULL, False),
    "glm4": ("Glm4Config", {"head_dim": 16}, [4, 4, 4], True),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1]}, [8, 0, 8], False),
    "nemotron": ("NemotronConfig", {}, [4, 4, 4], False),
    "gpt_oss yarn": ("GptOssConfig", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, FULL, False),
    "llama4_text": (
        "Llama4TextConfig",
        {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2, "no_rope_layers": [1, 1, 0]},
        [8, 8, 0],
        True,
    ),
    "nanochat": ("NanoChatConfig", {}, FULL, False),
}


def tiny(config_class: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**TINY, **settings})
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def keys_of(model: PreTrainedModel, ids: Tensor, start: int) -> list[Tensor]:
    """The keys each layer stores for `ids` [B, S] at the positions start, start + 1, ..."""
    cache = DynamicCache(config=model.config)
    positions = torch.arange(start, start + ids.shape[1]).expand_as(ids)
    model(input_ids=ids, position_ids=positions, **{cache_argument(model.forward): cache})
    return [layer.keys for layer in cache.layers]  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", FAMILIES)
def test_rotated_keys_are_the_models_own_keys_at_shifted_positions(family: str) -> None:
    """Rotary attention is relative: a whole prompt, moved, has the same hidden states and its keys rotated."""
    config_class, settings, pairs, interleaved = FAMILIES[family]
    model = tiny(config_class, **settings)
    found = rotaries(model)
    assert [0 if rotary is None else len(rotary.inv_freq) for rotary in found] == pairs
    assert all(rotary is None or rotary.interleaved == interleaved for rotary in found)

    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(3))
    start = keys_of(model, ids, 5)
    for delta in (2, 300, 2995, -5):
        for layer, (rotary, key, moved) in enumerate(zip(found, start, keys_of(model, ids, 5 + delta), strict=True)):
            expected = key if rotary is None else rotary.rotate(key, delta)
            error = (moved - expected).abs().max() / key.abs().max()
            assert error < 3e-4, f"layer {layer}, delta {delta}"


def test_yarn_scales_keys_once_and_rotating_never() -> None:
    model = tiny("LlamaConfig", **YARN)
    plain = tiny("LlamaConfig")
    ids = torch.tensor([[50]])
    key = keys_of(model, ids, 0)[0]
    scale = float(key.norm() / keys_of(plain, ids, 0)[0].norm())
    assert scale == pytest.approx(0.1 * math.log(8.0) + 1.0, rel=1e-5)  # the yarn paper's factor
    rotary = rotaries(model)[0]
    assert rotary is not None
    torch.testing.assert_close(rotary.rotate(key, 4321).norm(), key.norm(), rtol=1e-5, atol=0)


def test_gemma3_layers_have_frequencies_of_their_own() -> None:
    config_class, settings, _, _ = FAMILIES["gemma3_text"]
    model = tiny(config_class, **settings)
    sliding, full, _ = (rotary.inv_freq for rotary in rotaries(model) if rotary is not None)
    exponents = torch.arange(8) / 8
    parameters = model.config.rope_parameters
    torch.testing.assert_close(sliding, parameters["sliding_attention"]["rope_theta"] ** -exponents)
    torch.testing.assert_close(full, parameters["full_attention"]["rope_theta"] ** -exponents)
    assert not torch.allclose(sliding, full)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "cohere", "glm4", "smollm3", "gpt_oss yarn", "llama4_text"])
def test_half_precision_models_have_the_same_rotary(family: str, dtype: torch.dtype) -> None:
    config_class, settings, _, _ = FAMILIES[family]
    model = tiny(config_class, **settings)
    exact = rotaries(model)
    model.to(dtype)  # type: ignore[arg-type]
    for kept, reference in zip(rotaries(model), exact, strict=True):
        assert (kept is None) == (reference is None)
        if kept is not None and reference is not None:
            assert kept.interleaved == reference.interleaved
            torch.testing.assert_close(kept.inv_freq, reference.inv_freq.to(dtype), rtol=0, atol=0)


def test_a_trained_length_of_millions_is_no_reason_to_refuse() -> None:
    assert len(rotaries(tiny("LlamaConfig", max_position_embeddings=10_485_760))) == 3


def test_the_model_is_left_as_it_was() -> None:
    model = tiny("PhiConfig", resid_pdrop=0.5, embd_pdrop=0.5, attention_dropout=0.5)
    expected = rotaries(model)
    model.train()
    model.model.layers[1].eval()  # type: ignore[index,operator]
    flags = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    config = model.config.to_dict()
    random_state = torch.get_rng_state()

    found = rotaries(model)

    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.config.to_dict() == config
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(tensor, state[name]), name
        assert tensor.grad is None
    for kept, reference in zip(found, expected, strict=True):
        assert kept is not None and reference is not None and torch.equal(kept.inv_freq, reference.inv_freq)


def test_a_model_whose_weights_accelerate_holds_elsewhere() -> None:
    model = tiny("LlamaConfig")
    expected = rotaries(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    for kept, reference in zip(rotaries(model), expected, strict=True):
        assert kept is not None and reference is not None and torch.equal(kept.inv_freq, reference.inv_freq)


def ignoring_positions() -> PreTrainedModel:
    """Counts positions by itself, whatever it is told."""
    model = tiny("LlamaConfig")
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "position_ids": None}), with_kwargs=True)
    return model


def without_keys() -> PreTrainedModel:
    model = tiny("LlamaConfig")
    torch.nn.init.zeros_(model.model.layers[1].self_attn.k_proj.weight)  # type: ignore[index,union-attr,arg-type]
    return model


def adding_positions() -> PreTrainedModel:
    """Adds the position to the hidden states, besides rotating."""

    def add(_: torch.nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> tuple[tuple[Tensor], dict[str, Any]]:
        return (args[0] + kwargs["position_ids"][..., None].sin(),), kwargs

    model = tiny("LlamaConfig")
    model.model.layers[0].register_forward_pre_hook(add, with_kwargs=True)  # type: ignore[index,operator]
    return model


def scaled_after_rotating() -> PreTrainedModel:
    model = tiny("HunYuanDenseV1Config", head_dim=16)  # its norms, per channel, come after the rotary
    for layer in model.model.layers:  # type: ignore[union-attr]
        torch.nn.init.uniform_(layer.self_attn.key_layernorm.weight, 0.5, 1.5)
    return model


def m_rope() -> PreTrainedModel:
    section = scaled("default", mrope_section=[2, 3, 3])
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TINY, **section}, vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2}
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


LONGROPE = scaled("longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8, original_max_position_embeddings=128)
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
HYBRID = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "dynamic NTK": (lambda: tiny("LlamaConfig", **scaled("dynamic", factor=4.0)), "rope type 'dynamic' depend"),
    "longrope": (lambda: tiny("Phi3Config", **LONGROPE), "rope type 'longrope' depend on the length"),
    "M-RoPE": (m_rope, r"several axes \(M-RoPE, mrope_section=\[2, 3, 3\]\)"),
    "gpt2": (lambda: tiny("GPT2Config"), r"learned embeddings \(transformer\.wpe\)"),
    "opt": (
        lambda: tiny("OPTConfig", word_embed_proj_dim=64, ffn_dim=96),
        r"learned embeddings \(model\.decoder\.embed_positions\)",
    ),
    "bloom": (lambda: tiny("BloomConfig"), "ALiBi"),
    "falcon alibi": (lambda: tiny("FalconConfig", alibi=True), "ALiBi"),
    "mpt": (lambda: tiny("MptConfig", d_model=64, n_heads=4, n_layers=2), "ALiBi"),
    "deepseek_v3": (lambda: tiny("DeepseekV3Config", **MLA), "MLA"),
    "qwen3_next": (lambda: tiny("Qwen3NextConfig", **HYBRID), r"layers without softmax attention \(linear_attention\)"),
    "gptj": (lambda: tiny("GPTJConfig", rotary_dim=8), "no module with rotary frequencies"),
    "scaled after rotating": (scaled_after_rotating, "keys of layer 0 are reproduced by no rotary frequencies"),
    "keys of zero": (without_keys, "keys of layer 1 are all zero"),
    "positions ignored": (ignoring_positions, "no key changes with `position_ids`"),
    "positions added": (adding_positions, "values of layer 0 change with the position"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_moved_is_refused_with_its_reason(case: str) -> None:
    build, reason = REFUSED[case]
    model = build().eval()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(RotaryError, match=reason) as error:
        rotaries(model)
    assert str(error.value).startswith(f"keys of {type(model).__name__} cannot be moved to other positions: ")
    assert str(error.value).endswith('use positions="original"')
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
