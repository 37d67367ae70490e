"""A method of the user's own: the very block that README shows, run as a script, does what a method does."""

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import kvcompress as kvc
from kvcompress.cli import app
from kvcompress.methods.base import registry
from kvcompress.prefix.sizes import MethodSize, kv_size
from tests.reachable import reachable_bytes
from tests.tiny import save_tiny, tiny_llama

README = Path(__file__).parents[2] / "README.md"
PROMPT, BUDGET, NEW = 48, 12, 24
PACKING = "kivi(bits=4, group_size=8, residual=8)"


def readme_block() -> str:
    """The Python of README's "Add a method"."""
    section = README.read_text().partition("\n## Add a method\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return block


@pytest.fixture
def knorm(tmp_path: Path) -> Iterator[Any]:
    """The class that the block defines, as a script of its own."""
    script = tmp_path / "my_method.py"
    script.write_text(readme_block())
    yield runpy.run_path(str(script))["Knorm"]
    registry.pop("knorm", None)


def text(columns: int = PROMPT + NEW) -> Tensor:
    return torch.randint(3, 250, (1, columns), generator=torch.Generator().manual_seed(3))


def plain_keys(ids: Tensor) -> list[Tensor]:
    """The model's own keys [H, T, D] by layer."""
    with torch.no_grad():
        out = tiny_llama()(ids, use_cache=True)
    cache = cast("Any", out.get("cache", out.get("past_key_values")))
    return [layer.keys[0] for layer in cache.layers]


def smallest(keys: Tensor, count: int) -> list[list[int]]:
    """Positions of the `count` keys of the smallest norm in every head of keys [H, T, D]."""
    return keys.norm(dim=-1).topk(count, largest=False).indices.sort(-1).values.tolist()


@pytest.mark.parametrize("partner", ["", f" | {PACKING}"])
def test_the_block_of_the_readme_keeps_the_smallest_keys(knorm: Any, partner: str) -> None:
    ids = text()
    keys = plain_keys(ids)
    with kvc.wrap(tiny_llama(), f"knorm(budget={BUDGET}){partner}") as wrapped:
        assert wrapped.method.evicting == knorm(budget=BUDGET)
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :PROMPT], cache=cache)
        for layer, own in enumerate(keys):
            assert cache.kept(layer)[0].tolist() == smallest(own[:, :PROMPT], BUDGET)
        assert cache.nbytes == reachable_bytes(cache) == sum(cache.memory().values())
        first = cache.kept(0)[0]
        wrapped.prefill(ids[:, PROMPT:], cache=cache)  # a further prompt, over packed keys where there is a partner
    chosen = cache.kept(0)[0].tolist()  # the first layer's keys depend on no other token, whatever was evicted
    if not partner:
        stored = [[*head, *range(PROMPT, PROMPT + NEW)] for head in first.tolist()]
        for head, (positions, own) in enumerate(zip(stored, keys[0], strict=True)):
            best = smallest(own[positions][None], BUDGET)[0]
            assert chosen[head] == [positions[slot] for slot in best]
    assert all(len(head) == BUDGET for head in chosen)


def test_a_ratio_is_one_of_the_text_so_far(knorm: Any) -> None:
    ids = text()
    with kvc.wrap(tiny_llama(), f"knorm(budget=0.25) | {PACKING}") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids[:, :PROMPT], cache=cache)
        assert cache.kept(1).shape[-1] == PROMPT // 4
        wrapped.prefill(ids[:, PROMPT:], cache=cache)
        assert cache.kept(1).shape[-1] == (PROMPT + NEW) // 4


def test_the_block_of_the_readme_has_a_text_form(knorm: Any) -> None:
    assert kvc.methods()["knorm"] is knorm
    for text_form in (
        "knorm(budget=0.25)",
        "knorm(positions='cache', budget='4KiB')",
        "knorm(budget=0.25) | kivi(bits=4)",
    ):
        assert str(kvc.parse(text_form)) == text_form
    with pytest.raises(kvc.MethodError, match=r"knorm has no option 'budge'; did you mean 'budget'"):
        kvc.parse("knorm(budge=64)")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("budget=-5", "budget -5 tokens is less than one token"),
        ("budget=7.5", r"budget 7.5 as a ratio must lie in \(0, 1\]"),
        ("budget='many'", "budget 'many' is not a size in bytes"),
        ("budget=None", "budget must be tokens .* got None"),
        ("budget=9, positions='nonsense'", "positions must be .*, got 'nonsense'"),
    ],
)
def test_what_its_options_cannot_mean_is_refused_without_a_word_in_the_block(
    knorm: Any, options: str, reason: str
) -> None:
    with pytest.raises(kvc.MethodError, match=reason):
        kvc.parse(f"knorm({options})")


@pytest.mark.parametrize("method", ["knorm(budget=0.25)", f"knorm(budget=0.25) | {PACKING}"])
def test_its_size_is_what_a_cache_stores(knorm: Any, tmp_path: Path, method: str) -> None:
    model, ids = tiny_llama(), text(128)
    with kvc.wrap(model, method) as wrapped:
        wrapped.prefill(ids, cache=(cache := wrapped.new_cache()))
    memory = cache.memory()
    stored = sum(memory.values()) - memory["spare"]
    assert MethodSize(kv_size(model.config), method).bytes_at(128) == stored
    command = ["size", str(save_tiny(tmp_path / "model")), "--context", "128", "--method", method, "--json"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["bytes"] == stored


@pytest.mark.parametrize("method", ["knorm(budget=0.25)", f"knorm(budget=0.25) | {PACKING}"])
def test_it_generates_forks_and_is_saved(knorm: Any, tmp_path: Path, method: str) -> None:
    model, ids = tiny_llama(), text()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with kvc.wrap(model, method) as wrapped:
        wrapped.generate(ids[:, :PROMPT], **options)
        cache = wrapped.cache
        cache.save(tmp_path / "cache.safetensors")
        loaded = kvc.load_cache(tmp_path / "cache.safetensors", model)
        again = [wrapped(ids[:, PROMPT:], cache=each).logits for each in (cache.fork(), loaded, cache)]
    assert all(torch.equal(each, again[0]) for each in again)
