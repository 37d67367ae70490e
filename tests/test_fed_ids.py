"""A cache knows the ids that every row was fed, however they came to it, and holds no tensor for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvcompress as kvc
from kvcompress import CacheError, CompressedCache, PrefixCache
from kvcompress.fed_ids import MOST_WAITING, FedIds
from tests.families import FAMILIES, VOCABULARY, tiny
from tests.reachable import reachable_bytes
from tests.turns import METHODS, Script, scripts

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
IDS = torch.randint(3, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(0))


def known(cache: CompressedCache) -> list[list[int]]:
    return [row.tolist() for row in cache.fed.rows]


def own_ids(script: Script) -> list[list[int]]:
    return [row[padding:] for row, padding in zip(script.ids.tolist(), script.padding, strict=True)]


@pytest.mark.parametrize("method", METHODS[::4])
@given(script=scripts(), order=st.permutations(range(3)))
@settings(max_examples=5)
def test_padded_rows_chunks_turns_forks_and_reordered_rows(method: str, script: Script, order: list[int]) -> None:
    with kvc.wrap(tiny("llama"), method) as wrapped:
        cache, ids = wrapped.new_cache(), own_ids(script)
        script.play(wrapped, cache)
        assert known(cache) == ids
        assert cache.nbytes == reachable_bytes(cache, not_from=cache.rotaries)
        fork = cache.fork(2)
        wrapped(torch.full((fork.rows, 1), 7), cache=fork)
        assert known(fork) == [[*row, 7] for row in ids for _ in range(2)]
        rows = [row for row in order if row < cache.rows]
        fork.batch_select_indices(torch.tensor([2 * row for row in rows]))
        assert known(fork) == [[*ids[row], 7] for row in rows]
        assert known(cache) == ids


@pytest.mark.parametrize("family", FAMILIES)
def test_what_generate_feeds_in_every_family(family: str) -> None:
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    with kvc.wrap(tiny(family), "exact") as wrapped:
        text = wrapped.generate(IDS, attention_mask=mask, max_new_tokens=5, **GREEDY).tolist()
        assert known(wrapped.cache) == [text[0][:-1], text[1][4:-1]]  # the last token was never fed


@pytest.mark.parametrize("turns", [1, 2])
def test_every_beam_has_the_ids_of_its_own_text(turns: int) -> None:
    """The KV says whose it is: that of the known ids, computed by the plain model."""
    model = tiny("llama")
    with kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache()
        if turns == 2:
            wrapped.prefill(IDS[:, :12], cache=cache)
        new = IDS[:, 12:] if turns == 2 else IDS
        wrapped.generate(new, cache=cache, max_new_tokens=8, num_beams=3, num_return_sequences=2, **GREEDY)
        texts = known(cache)
    assert [len(row) for row in texts] == [37] * 6 and len(set(map(tuple, texts))) > 2
    with torch.no_grad():
        plain = model(torch.tensor(texts)).past_key_values
    for layer, own in zip(cache.layers, plain.layers, strict=True):
        torch.testing.assert_close(layer.store.keys, own.keys, rtol=0, atol=1e-4)  # pyright: ignore


@pytest.mark.parametrize("method", ["exact", "h2o(heavy=6, recent=6)", "kivi(bits=2, group_size=8, residual=16)"])
def test_a_reused_prefix_a_compression_afterwards_and_a_file(method: str, tmp_path: Path) -> None:
    model = tiny("llama")
    store = PrefixCache(model, block=4, checkpoint=4)
    other = torch.cat([IDS[:, :15], IDS[:, :9]], 1)
    mask = torch.ones_like(other)
    mask[0, :3] = 0  # only the second row shares its beginning
    with kvc.wrap(model, method, prefix_cache=store) as wrapped:
        wrapped.prefill(IDS)
        cache = wrapped.new_cache()
        wrapped.prefill(other, mask, cache)
        assert cache.reused_tokens == [0, 12]
        wrapped(IDS[:, :1], cache=cache)
    ids = torch.cat([other, IDS[:, :1]], 1).tolist()
    assert known(cache) == [ids[0][3:], ids[1]]
    cache.save(tmp_path / "cache")
    loaded = kvc.load_cache(tmp_path / "cache", model)
    assert known(loaded) == known(cache)
    with kvc.wrap(model, method) as wrapped:
        wrapped(IDS[:, 1:2], cache=loaded)
    assert [row[-1] for row in known(loaded)] == IDS[:, 1].tolist()
    with kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache(gather_for=[method])
        wrapped.prefill(IDS, cache=cache)
    later = cache.compress_as(kvc.parse(method))
    assert known(later) == known(cache) == IDS.tolist()


def test_a_failed_pass_and_a_failed_prompt_leave_what_was_known() -> None:
    model = tiny("llama")

    def fail(*_: Any) -> None:
        raise RuntimeError("stopped")

    with kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache()
        for layer in (0, 1):
            hook = model.model.layers[layer].register_forward_pre_hook(fail)  # pyright: ignore
            with pytest.raises(RuntimeError, match="stopped"):
                wrapped.prefill(IDS, cache=cache)
            hook.remove()
            if layer == 0:
                wrapped.prefill(IDS, cache=cache)
            assert known(cache) == IDS.tolist()
            assert cache.nbytes == reachable_bytes(cache)


@pytest.mark.parametrize("how", ["inputs_embeds", "token_type_ids"])
def test_nothing_is_known_from_a_call_on_that_ids_alone_do_not_describe(how: str, tmp_path: Path) -> None:
    model = tiny("gpt2")
    with kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(IDS, cache=cache)
        options: dict[str, Tensor] = {"input_ids": IDS[:, :4], "token_type_ids": IDS[:, :4]}
        if how == "inputs_embeds":
            options = {"inputs_embeds": model.get_input_embeddings()(IDS[:, :4])}
        model(**options, **{wrapped.cache_name: cache})
        wrapped(IDS[:, :1], cache=cache)
        cache.save(tmp_path / "cache")
        for each in (cache, cache.fork(), kvc.load_cache(tmp_path / "cache", model)):
            wrapped(IDS[:, :1], cache=each)
            assert known(each) == IDS.tolist()
            each.fed.check(1, IDS[1].tolist())
            with pytest.raises(CacheError, match="of row 1 only the first 30 ids are known, but 31 were given"):
                each.fed.check(1, [*IDS[1].tolist(), 5])


def test_steps_are_read_when_somebody_asks_or_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device of its own: a tensor there says that it is not on the CPU."""
    monkeypatch.setattr(Tensor, "device", torch.device("cuda"))
    fed = FedIds([[], []])
    steps = torch.randint(0, 1000, (2, MOST_WAITING + 9))
    fed.add(steps[:, :5], [5, 3], decoding=False)
    reused = torch.empty(2, 1, dtype=torch.int64)
    for place in range(5, MOST_WAITING + 9):
        fed.add(reused.copy_(steps[:, place : place + 1]), [1, 1], decoding=True)
    assert [len(row) for row in fed._rows] == [MOST_WAITING + 5, MOST_WAITING + 3] and len(fed._waiting) == 4
    fed.reorder(torch.tensor([1, 1]))
    fed.add(reused.copy_(steps[:, :1]), [1, 1], decoding=True)
    assert len(fed._waiting) == 6
    own = steps[1, 2:].tolist()
    assert [row.tolist() for row in fed.rows] == [own + steps[:1, 0].tolist(), own + steps[1:, 0].tolist()]
