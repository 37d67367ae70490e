"""One layer under a method, fed with queries, keys and values made by hand, through the real attention function."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kvcompress as kvc
from kvcompress.attention import attention
from kvcompress.methods.base import Method
from kvcompress.rope import Rotary

GOLDEN = Path(__file__).parent.parent / "golden"


def golden(name: str) -> dict[str, Any]:
    """The worked values of one method."""
    return json.loads((GOLDEN / f"{name}.json").read_text())


class OneLayer:
    """A cache of one full-attention layer, without a model."""

    def __init__(self, method: Method | str, rotary: Rotary | None = None) -> None:
        self.cache = kvc.CompressedCache(kvc.parse(method), [None], "one layer", [rotary] if rotary else None)

    def call(self, query: Tensor, key: Tensor, value: Tensor | None = None, scaling: float = 1.0) -> Tensor:
        """Feeds query [B, H * G, T, D], key and value [B, H, T, D]; returns the output [B, T, H * G, D]."""
        batch, _, columns, _ = key.shape
        self.cache.begin_call(columns, [columns] * batch)
        stored = self.layer.update(key, key if value is None else value)
        output, _ = attention(nn.Module(), query, *stored, None, scaling=scaling)
        self.cache.end_call()
        return output

    @property
    def layer(self) -> Any:
        return self.cache.layers[0]

    @property
    def kept(self) -> list[list[int]]:
        """Positions kept by each KV head of the first row."""
        return self.cache.kept(0)[0].tolist()


def attending_as(probabilities: Tensor, tokens: list[int], dim: int) -> Tensor:
    """Queries [..., D] whose softmax over the one-hot keys of `tokens` is `probabilities` [..., len(tokens)]."""
    query = torch.zeros(*probabilities.shape[:-1], dim)
    query[..., tokens] = probabilities.clamp_min(1e-30).log()
    return query


def one_hot_keys(tokens: list[int], heads: int, dim: int) -> Tensor:
    """Keys [1, H, T, D]: dim t of token t is 1."""
    return torch.eye(dim)[tokens].expand(1, heads, -1, -1)
