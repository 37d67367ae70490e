"""What the tests of public bug reports share: methods small enough for tiny prompts, ids, masks and a plain truth."""

from functools import cache

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvcompress.compat import cache_argument
from tests.families import OPTIONS, VOCABULARY, build

STREAMING = "streaming_llm(sinks=3, window=9)"
STREAMING_ORIGINAL = "streaming_llm(sinks=3, window=9, positions='original')"
H2O = "h2o(heavy=6, recent=6)"
SNAPKV = "snapkv(budget=12, window=4)"
KIVI = "kivi(bits=2, group_size=8, residual=8)"
EVICTING = [STREAMING, STREAMING_ORIGINAL, H2O, SNAPKV]
METHODS = ["exact", STREAMING, H2O, SNAPKV, KIVI, f"h2o(heavy=8, recent=8) | {KIVI}"]
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def text(rows: int, columns: int, seed: int = 11) -> Tensor:
    """Ids [rows, columns], none of them the pad token."""
    return torch.randint(2, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(seed))


def left_padding(columns: int, *padding: int) -> Tensor:
    """The mask of a batch whose rows have so many columns of padding at the left."""
    return (torch.arange(columns) >= torch.tensor(padding)[:, None]).long()


@cache
def one_layer() -> PreTrainedModel:
    """A llama of a single layer, where the KV of a token depends on nothing but the token and its position."""
    return build("llama", **OPTIONS["llama"] | {"num_hidden_layers": 1})


def plain_keys(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The first layer's keys [B, H, T, D] of every token, made by the model alone."""
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, use_cache=True, **{cache_argument(model.forward): plain})
    return plain.layers[0].keys
