import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvcompress.fingerprint import Watch, weights_fingerprint
from kvcompress.models import load_model
from tests.families import build, tiny
from tests.fingerprint.models import own


def tensors(model: PreTrainedModel) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


@given(which=st.integers(0, 10**6), place=st.integers(0, 10**6))
def test_any_changed_value_of_any_weight_or_buffer_shows(which: int, place: int) -> None:
    model = own()
    watch, before = Watch(model), weights_fingerprint(model)
    assert watch.fingerprint() == before
    tensor = tensors(model)[which % len(tensors(model))]
    tensor.view(-1)[place % tensor.numel()] += 0.5
    assert watch.fingerprint() == weights_fingerprint(model) != before
    tensor.view(-1)[place % tensor.numel()] -= 0.5


def test_every_row_of_the_embedding_counts() -> None:
    model = own()
    watch = Watch(model)
    seen = {watch.fingerprint()}
    for row in range(61):
        model.get_input_embeddings().weight[row] += 1
        seen.add(watch.fingerprint())
    assert len(seen) == 62


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_saving_loading_and_copying_change_nothing(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    before = weights_fingerprint(model)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, device="cpu")
    assert weights_fingerprint(loaded) == weights_fingerprint(copy.deepcopy(model)) == before
    assert weights_fingerprint(loaded.bfloat16()) != before


HARMLESS = {
    "pad_token_id": 3,
    "eos_token_id": [2, 3],
    "use_cache": False,
    "id2label": {0: "yes"},
    "output_hidden_states": True,
    "temperature": 0.5,
    "attention_dropout": 0.1,
    "initializer_range": 0.5,
    "name_or_path": "elsewhere",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_kv_changes_no_fingerprint(name: str) -> None:
    model = own()
    watch, before = Watch(model), weights_fingerprint(model)
    setattr(model.config, name, HARMLESS[name])
    model.generation_config.max_new_tokens = 7
    model.generation_config.do_sample = True
    model.train()
    model.requires_grad_(True)
    model.set_attn_implementation("eager")
    assert watch.fingerprint() == weights_fingerprint(model) == before


def _scaling(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 2


def _epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.1


def _rope(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 1e6


def _activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def _new_buffer(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.register_buffer("inv_freq", rotary.inv_freq * 2, persistent=False)


def _other_memory(model: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data * 2


def _assigned(model: Any) -> None:
    model.load_state_dict({**model.state_dict(), "lm_head.weight": model.lm_head.weight * 2}, assign=True)


CHANGES = [_scaling, _epsilon, _rope, _activation, _new_buffer, _other_memory, _assigned]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_the_model_computes_with_shows(change: Any) -> None:
    model = own()
    watch, before = Watch(model), weights_fingerprint(model)
    assert watch.fingerprint() == before
    change(model)
    assert watch.fingerprint() == weights_fingerprint(model) != before


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_step_of_any_optimizer_shows(how: dict[str, bool]) -> None:
    model = own().requires_grad_(True)
    watch, before = Watch(model), weights_fingerprint(model)
    assert watch.fingerprint() == before
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, **how).step()
    assert watch.fingerprint() == weights_fingerprint(model) != before


def test_a_write_past_the_counters_shows_once_all_is_read_anew() -> None:
    model = own()
    watch = Watch(model)
    before = watch.fingerprint()
    model.lm_head.weight.data.mul_(2)
    assert watch.fingerprint() == before
    assert watch.fingerprint() != weights_fingerprint(model) == watch.fingerprint() != before


def test_frequencies_that_follow_the_length_are_no_change() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = build("llama", max_position_embeddings=16, rope_parameters=rope, **sizes)
    watch, before = Watch(model), weights_fingerprint(model)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model(torch.zeros(1, 40, dtype=torch.long))
    assert not torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert watch.fingerprint() == weights_fingerprint(model) == before


def test_tensors_made_in_inference_mode_are_read_anew_when_asked() -> None:
    plain = own()
    with torch.inference_mode():
        model = LlamaForCausalLM(plain.config).eval()
        model.load_state_dict(plain.state_dict())
    watch = Watch(model)
    before = watch.fingerprint(thorough=True)
    assert before == watch.fingerprint() == weights_fingerprint(plain)
    with torch.inference_mode():
        model.lm_head.weight.mul_(2)
    assert watch.fingerprint(thorough=True) == weights_fingerprint(model) != before


def test_what_accelerate_offloads_is_read_where_it_lies(tmp_path: Path) -> None:
    model, before = own(), weights_fingerprint(own())
    ids = torch.arange(8)[None]
    for offloaded in (cpu_offload(own(), torch.device("cpu")), disk_offload(own(), tmp_path, torch.device("cpu"))):
        assert next(offloaded.parameters()).is_meta
        watch = Watch(offloaded)
        assert watch.fingerprint() == weights_fingerprint(offloaded) == before
        assert torch.equal(offloaded(ids).logits, model(ids).logits)
        assert watch.fingerprint() == before


def test_weights_that_are_nowhere_are_refused() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64))
    with pytest.raises(ValueError, match=r"parameter 'lm_head.weight' holds no data here"):
        weights_fingerprint(model)


def test_the_parts_of_a_wrapping_tensor_count() -> None:
    model = own()
    weight = model.lm_head.weight.detach()
    model.lm_head.weight = torch.nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
    watch, before = Watch(model), weights_fingerprint(model)
    assert watch.fingerprint() == before
    model.lm_head.weight.b[5] += 1
    assert watch.fingerprint() == weights_fingerprint(model) != before


def test_nothing_keeps_a_model_alive() -> None:
    model = own()
    weights_fingerprint(model)
    Watch(model).fingerprint()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
