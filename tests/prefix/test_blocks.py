"""Block keys against worked values, and block integers against the prompts they stand for."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.prefix.blocks import ROOT, BlockTable, block_key, block_keys, extra_bytes

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "block_hash.json").read_text())
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def short(key: bytes) -> str:
    return key[:8].hex()


def test_keys_are_the_worked_values() -> None:
    assert short(ROOT) == GOLDEN["root"]
    assert [short(key) for key in block_keys([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)] == [GOLDEN["1234"], GOLDEN["1234_5678"]]
    assert short(block_key(ROOT, [5, 6, 7, 8])) == GOLDEN["5678_at_root"]
    assert short(block_key(ROOT, [1, 2, 3, 4], b"salt")) == GOLDEN["1234_salt"]


def test_an_array_gives_the_same_keys_as_a_list() -> None:
    assert block_keys(np.array([1, 2, 3, 4], dtype=np.int64), 2) == block_keys([1, 2, 3, 4], 2)  # pyright: ignore


@given(PROMPTS, st.integers(1, 4))
def test_keys_are_equal_exactly_where_the_prefixes_are(prompts: list[list[int]], block: int) -> None:
    prefix_of: dict[bytes, tuple[int, ...]] = {}
    for prompt in prompts:
        keys = block_keys(prompt, block)
        assert len(keys) == len(prompt) // block
        for i, key in enumerate(keys, 1):
            assert prefix_of.setdefault(key, tuple(prompt[: i * block])) == tuple(prompt[: i * block])
    assert len(set(prefix_of.values())) == len(prefix_of)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["7"], [True, False], [2**70]])
def test_a_bad_token_id_is_named(tokens: list) -> None:
    with pytest.raises(ValueError, match=r"token id .*expected an integer from 0 to 4294967295"):
        block_key(ROOT, tokens)


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="block=0"):
        block_keys([1, 2], 0)


def test_extra_bytes_tell_parts_apart() -> None:
    assert extra_bytes({"a": "1", "b": "2"}) == extra_bytes({"b": "2", "a": b"1"})
    different = [{"a": "1", "b": "2"}, {"a": "12", "b": ""}, {"ab": "12"}, {"a": "1b2"}, {"a": "2", "b": "1"}, {}]
    assert len({extra_bytes(parts) for parts in different}) == len(different)


@given(PROMPTS, st.integers(1, 3))
def test_block_integers_stand_for_prefixes(prompts: list[list[int]], block: int) -> None:
    """Contents that repeat after other prefixes, or with other sizes, are other blocks."""
    table, seen = BlockTable(), {}
    for prompt in prompts:
        parent = -1
        for start in range(0, len(prompt), block):
            piece = prompt[start : start + block]
            name = table.add(parent, sum(piece), len(piece))
            parts = tuple((sum(prompt[i : i + block]), len(prompt[i : i + block])) for i in range(0, start + 1, block))
            assert seen.setdefault(name, parts) == parts
            assert table.parent[name] == parent
            assert table.end[name] == start + len(piece)
            parent = name
    assert len(set(seen.values())) == len(table) == len(seen)
