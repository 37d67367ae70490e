"""jy-yuan/KIVI #18: a larger batch gave worse results, because padding was packed with the tokens.

The kind: a row's codes, scales and minima are those of that row alone, whatever it is batched with.
"""

import pytest
import torch

import kvcompress as kvc
from tests.bugs.common import GREEDY, KIVI, left_padding, text
from tests.families import tiny

PADDING = (0, 5, 13, 29)
COLUMNS = 43
METHODS = [KIVI, "kivi(bits=4, group_size=16, residual=16)", f"streaming_llm(sinks=3, window=16) | {KIVI}"]


@pytest.mark.parametrize("method", METHODS)
def test_a_rows_codes_do_not_depend_on_its_batch(method: str) -> None:
    ids, later = text(4, COLUMNS), text(4, 12, seed=12)
    with kvc.wrap(tiny("llama"), method) as wrapped:
        batch = wrapped.new_cache()
        wrapped.prefill(ids, left_padding(COLUMNS, *PADDING), batch)
        logits = torch.cat([wrapped(later[:, :5], cache=batch).logits, wrapped(later[:, 5:], cache=batch).logits], 1)
        for row, padding in enumerate(PADDING):
            alone = wrapped.new_cache()
            wrapped.prefill(ids[row : row + 1, padding:], cache=alone)
            expected = [wrapped(later[row : row + 1, part], cache=alone).logits for part in (slice(5), slice(5, 12))]
            torch.testing.assert_close(logits[row], torch.cat(expected, 1)[0], rtol=2e-4, atol=2e-4)
            for layer in range(2):
                store, single = batch.layers[layer].store, alone.layers[layer].store
                state, own = store.state(), single.state()
                for name in ("lengths", "fronts", "packed_keys", "packed_values", "seen"):
                    assert state[name][row] == own[name][0], name
                if layer == 0:  # later layers differ by rounding
                    for name, tensor in single.tensors().items():
                        part = store.tensors()[name][row : row + 1, :, : tensor.shape[2]]
                        assert torch.equal(part, tensor), name


@pytest.mark.parametrize("method", METHODS)
def test_a_row_generates_the_same_in_any_batch(method: str) -> None:
    ids = text(4, COLUMNS)
    with kvc.wrap(tiny("llama"), method) as wrapped:
        together = wrapped.generate(ids, attention_mask=left_padding(COLUMNS, *PADDING), **GREEDY)
        for row, padding in enumerate(PADDING):
            alone = wrapped.generate(ids[row : row + 1, padding:], **GREEDY)
            assert torch.equal(together[row, COLUMNS:], alone[0, COLUMNS - padding :])
