"""What turns a model's keys, so that no KV turned otherwise is taken for its own."""

import hashlib
import json

from transformers import PreTrainedModel

from kvcompress.errors import CacheError

LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
"""Rope types whose frequencies, and so every token's KV, depend on the length of the whole prompt."""


def rotary_settings(model: PreTrainedModel) -> str:
    """SHA-256 of the configuration's rope parameters and the frequencies in the modules.

    Raises CacheError where the frequencies depend on the length of the prompt (dynamic NTK, longrope).
    """
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for scaling in (parameters, *(inner for inner in parameters.values() if isinstance(inner, dict))):
        kind = str(scaling.get("rope_type", scaling.get("type", "")))
        if kind in LENGTH_DEPENDENT or "dynamic" in kind:
            raise CacheError(
                f"the keys of {type(model).__name__} depend on the length of the whole prompt (rope type {kind!r}), so "
                "a stored prefix is not what another prompt would compute; run it without a prefix cache"
            )
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True, default=str).encode())
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            digest.update(name.encode() + buffer.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()
