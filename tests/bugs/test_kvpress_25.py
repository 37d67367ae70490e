"""NVIDIA/kvpress #25: padding took part in the scores and was kept in the place of tokens.

The kind: what stands under the padding, and how much padding there is, changes nothing at all.
"""

import pytest
import torch

import kvcompress as kvc
from tests.bugs.common import GREEDY, METHODS, left_padding, text
from tests.families import tiny


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("method", METHODS)
def test_what_stands_under_the_padding_changes_nothing(method: str, family: str) -> None:
    ids, other, mask = text(2, 34), text(2, 34, seed=12), left_padding(34, 4, 21)
    changed = torch.where(mask.bool(), ids, other)
    assert not torch.equal(changed, ids)
    with kvc.wrap(tiny(family), method) as wrapped:
        caches = [wrapped.new_cache(), wrapped.new_cache()]
        logits = [wrapped.prefill(each, mask, cache).logits for each, cache in zip((ids, changed), caches, strict=True)]
        logits += [wrapped(ids[:, :3], cache=cache).logits for cache in caches]
        assert torch.equal(logits[0], logits[1])
        assert torch.equal(logits[2], logits[3])
        for layer in range(len(caches[0].layers)):
            kept = caches[0].kept(layer)
            assert torch.equal(kept, caches[1].kept(layer))
            assert kept[0].max() == 32 and kept[1].max() == 15  # 30 and 13 tokens, then 3
            assert caches[0].nbytes == caches[1].nbytes


@pytest.mark.parametrize("method", METHODS)
def test_how_much_padding_there_is_changes_nothing(method: str) -> None:
    ids = text(1, 26)
    with kvc.wrap(tiny("llama"), method) as wrapped:
        expected = wrapped.generate(ids, **GREEDY)[0, 26:]
        kept = [wrapped.cache.kept(layer) for layer in range(2)]
        for padding in (1, 8, 40):
            padded = torch.cat([torch.zeros(1, padding, dtype=torch.long), ids], 1)
            found = wrapped.generate(padded, attention_mask=left_padding(26 + padding, padding), **GREEDY)
            assert torch.equal(found[0, 26 + padding :], expected)
            assert all(torch.equal(wrapped.cache.kept(layer), kept[layer]) for layer in range(2))
            assert wrapped.cache.seen.tolist() == [31]
