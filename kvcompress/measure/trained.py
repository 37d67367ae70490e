"""A text longer than the model was trained for: numbers from there say little, and a warning says so."""

from __future__ import annotations

import warnings

from transformers import PreTrainedConfig

from kvcompress.prompt import trained_length


def warn_past_trained(config: PreTrainedConfig, tokens: int, parts: str) -> None:
    """Warns if `tokens`, which are made of `parts`, exceed the length that a model of `config` was trained for."""
    trained = trained_length(config)
    if trained is not None and tokens > trained:
        warnings.warn(
            f"{tokens} tokens ({parts}) are more than the {trained} that the model was trained for "
            '(max_position_embeddings): exact, and every method without positions="cache", runs outside its range',
            stacklevel=3,
        )
