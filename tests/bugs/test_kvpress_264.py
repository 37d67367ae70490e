"""NVIDIA/kvpress #264: a ratio of a short prompt was rounded down to nothing, and its cache was emptied.

The kind: every ratio of every length keeps at least one token, exactly as many as it says, row by row.
"""

from fractions import Fraction

import pytest
import torch

import kvcompress as kvc
from tests.bugs.common import KIVI, left_padding, text
from tests.families import tiny

RATIOS = ["0.01", "0.1", "0.3", "0.5", "0.7", "0.9", "1.0"]
ROWS = 16


def expected(ratio: str, tokens: int) -> int:
    return max(1, int(Fraction(ratio) * tokens))


FORMS = [
    "snapkv(budget={r})",
    "snapkv(budget={r}, window=3, positions='cache')",
    "streaming_llm(budget={r})",
    "streaming_llm(sinks=0, budget={r}, positions='original')",
    "h2o(budget={r})",
    "h2o(heavy={r}, recent={r})",
]
PACKED = [f"{form} | {KIVI}" for form in (FORMS[0], FORMS[2], FORMS[5])]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("form", FORMS + PACKED)
def test_one_to_sixteen_tokens_keep_what_the_ratio_says(form: str, ratio: str) -> None:
    """All sixteen lengths at once, each a row of a padded batch."""
    ids, mask = text(ROWS, 16), left_padding(16, *range(15, -1, -1))
    with kvc.wrap(tiny("llama"), form.format(r=ratio)) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(ids, mask, cache)
        for row in range(ROWS):
            keeps = expected(ratio, row + 1)
            if "heavy" in form:
                keeps = min(row + 1, 2 * keeps)
            for layer in range(2):
                assert (cache.kept(layer)[row] >= 0).sum(-1).tolist() == [keeps] * 2, row
                assert cache.kept(layer)[row].max() == row
        logits = wrapped(ids[:, :1], cache=cache).logits
        assert logits.isfinite().all()
        # The shortest prompt kept its one token, so nothing was lost to it.
        alone = wrapped.new_cache()
        wrapped.prefill(ids[:1, 15:], cache=alone)
        torch.testing.assert_close(wrapped(ids[:1, :1], cache=alone).logits[0], logits[0], rtol=1e-4, atol=1e-4)
    with kvc.wrap(tiny("llama"), "exact") as wrapped:
        wrapped.prefill(ids[:1, 15:])
        exact = wrapped(ids[:1, :1], cache=wrapped.cache).logits
    torch.testing.assert_close(logits[:1], exact, rtol=1e-4, atol=1e-4)
