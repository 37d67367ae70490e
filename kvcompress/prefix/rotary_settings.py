"""Which rotary embeddings keep a prefix from being reused."""

from transformers import PreTrainedModel

from kvcompress.errors import CacheError
from kvcompress.fingerprint.settings import follows_length


def refuse_length_dependent(model: PreTrainedModel) -> None:
    """Raises CacheError where the frequencies depend on the length of the prompt (dynamic NTK, longrope)."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for scaling in (parameters, *(inner for inner in parameters.values() if isinstance(inner, dict))):
        kind = scaling.get("rope_type", scaling.get("type", ""))
        if follows_length(kind):
            raise CacheError(
                f"the keys of {type(model).__name__} depend on the length of the whole prompt (rope type {kind!r}), so "
                "a stored prefix is not what another prompt would compute; run it without a prefix cache"
            )
