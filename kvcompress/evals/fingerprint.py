"""What the answers of an lm-eval model depend on, beside what is asked."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lm_eval.models.huggingface import HFLM

from kvcompress.measure.record import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WITHOUT_EFFECT = {
    "pretrained": "the identity of the weights and of the configuration says what was loaded",
    "tokenizer": "`tokenizer_fingerprint` says what was loaded",
    "device": "its type is named",
    "batch_size": "each request is answered as alone",
    "max_batch_size": "each request is answered as alone",
    "logits_cache": "it belongs to lm-eval's own likelihoods, which are not used",
}
"""Arguments of lm-eval's `hf` that change no answer by themselves, and why. All others are in the fingerprint."""


def answers_fingerprint(lm: Any, options: Mapping[str, Any]) -> str:
    """A digest of all that the answers of `lm`, a `CompressedLM`, depend on beside the requests.

    `options` are the arguments given to lm-eval's `hf`; each is in the digest, with its default where it was not
    given, but for those that are `WITHOUT_EFFECT`.
    """
    arguments = inspect.signature(HFLM.__init__).parameters.values()
    given = {each.name: each.default for each in arguments if each.default is not each.empty} | dict(options)
    generation: dict[str, Any] = lm.model.generation_config.to_dict()
    return digest(
        {
            "weights": lm.wrapped.identity,
            "tokenizer": lm.tokenizer_fingerprint,
            "method": str(lm.method),
            "prefill_chunk": lm.prefill_chunk,
            "device": lm.device.type,
            "lengths": [lm.max_length, lm.max_gen_toks],
            "prefix": lm.prefix_token_id,
            "generation": {name: value for name, value in generation.items() if name != "transformers_version"},
            "options": {name: value for name, value in given.items() if name not in WITHOUT_EFFECT},
        }
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of all that saving a tokenizer keeps, so of its vocabulary, special tokens and chat template."""
    saved = hashlib.sha256()
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                saved.update(path.name.encode() + hashlib.sha256(_content(path)).digest())
    return saved.hexdigest()


def _content(path: Path) -> bytes:
    """What a file says of the tokenizer itself: not where it came from, nor how its last call padded and cut."""
    content = path.read_bytes()
    if path.name == "tokenizer.json":
        return content[max(content.find(b'"added_tokens"'), 0) :]  # version, truncation and padding stand before
    if path.name == "tokenizer_config.json":
        source = ("name_or_path", "is_local", "local_files_only")
        return digest({name: value for name, value in json.loads(content).items() if name not in source}).encode()
    return content
