from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcompress.fingerprint import Watch, weights_fingerprint
from tests.fingerprint.models import activate, draw_adapters, own, with_adapters

peft = pytest.importorskip("peft", reason="peft is not installed")
IDS = torch.arange(20)[None]


def _tuners(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)]


def _switch(model: Any) -> None:
    activate(model, "first")


def _both(model: Any) -> None:
    activate(model, "first", "second")


def _disable(model: Any) -> None:
    activate(model)


def _scale(model: Any) -> None:
    for layer in _tuners(model):
        layer.set_scale("second", 0.5)


def _merge(model: Any) -> None:
    for layer in _tuners(model):
        layer.merge()


def _train(model: Any) -> None:
    _tuners(model)[0].lora_B["second"].weight[0] += 1


@pytest.mark.parametrize("change", [_switch, _both, _disable, _scale, _merge, _train], ids=lambda each: each.__name__)
def test_which_adapters_act_and_how_shows(change: Callable[[Any], None]) -> None:
    model = with_adapters("first", "second")
    watch, before = Watch(model), weights_fingerprint(model)
    assert watch.fingerprint() == before
    logits = model(IDS).logits
    change(model)
    assert not torch.equal(model(IDS).logits, logits)
    assert watch.fingerprint() == weights_fingerprint(model) != before


def test_putting_an_adapter_back_gives_the_first_fingerprint() -> None:
    model = with_adapters("first", "second")
    watch = Watch(model)
    before = watch.fingerprint()
    for change in (_switch, _disable):
        change(model)
        assert watch.fingerprint() != before
        activate(model, "second")
        assert watch.fingerprint() == weights_fingerprint(model) == before


def test_an_adapter_that_does_not_act_changes_nothing() -> None:
    model = with_adapters("first")
    watch, before = Watch(model), weights_fingerprint(model)
    assert watch.fingerprint() == before
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), model, "other")
    activate(model, "first")
    assert watch.fingerprint() == weights_fingerprint(model) == before
    for layer in _tuners(model):
        layer.set_scale("other", 3.0)
        layer.lora_A["other"].weight.data = layer.lora_A["other"].weight.data + 1
    assert watch.fingerprint() == weights_fingerprint(model) == before


def test_what_unmerging_leaves_is_read_anew() -> None:
    model = with_adapters("first")
    watch = Watch(model)
    before = watch.fingerprint()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    _merge(model)
    watch.fingerprint()
    for layer in _tuners(model):
        layer.unmerge()
    assert any(not torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())  # rounding
    assert watch.fingerprint() == weights_fingerprint(model) != before


def test_a_peft_models_base_model() -> None:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    whole = peft.get_peft_model(own(), config, "first").eval()
    draw_adapters(whole)
    model = whole.get_base_model()
    watch, before = Watch(model), weights_fingerprint(model)
    assert watch.fingerprint() == before != weights_fingerprint(own())
    with whole.disable_adapter():
        assert watch.fingerprint() == weights_fingerprint(model) != before
    assert watch.fingerprint() == weights_fingerprint(model) == before


def test_a_layer_that_an_adapter_trains_whole() -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    whole = peft.get_peft_model(own(), config, "first").eval()
    model = whole.get_base_model()
    watch, before = Watch(model), weights_fingerprint(model)
    model.lm_head.modules_to_save["first"].weight.data.add_(1)
    assert weights_fingerprint(model) == watch.fingerprint() != before
    whole.disable_adapter_layers()
    assert watch.fingerprint() == weights_fingerprint(model)


def test_adapters_that_transformers_puts_in() -> None:
    model = own()
    watch, before = Watch(model), weights_fingerprint(model)
    try:
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]), "first")
    except ValueError as error:
        pytest.skip(str(error))
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]), "second")
    draw_adapters(model)
    found = {before, watch.fingerprint()}
    model.set_adapter("first")
    first = watch.fingerprint()
    model.disable_adapters()
    found |= {first, watch.fingerprint()}
    assert len(found) == 4
    model.enable_adapters()
    model.set_adapter("second")
    assert watch.fingerprint() in found - {first}
    model.set_adapter("first")
    assert watch.fingerprint() == weights_fingerprint(model) == first
