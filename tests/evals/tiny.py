"""A byte-level tokenizer, a trained one and a small haystack, all built in code."""

import copy
from functools import cache
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SENTENCE_BYTES = 80
"""No sentence of the small haystack is longer."""


def byte_level() -> Tokenizer:
    """One token a byte: lengths of ASCII text can be told with ``len``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def trained() -> PreTrainedTokenizerFast:
    """Merges learned from the small haystack, so that the tokens of joined texts do not add up exactly."""
    tokenizer = byte_level()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"]
    )
    tokenizer.train_from_iterator([small_haystack()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def chatting() -> PreTrainedTokenizerFast:
    """The trained tokenizer with a chat template."""
    tokenizer = copy.deepcopy(trained())
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


@cache
def small_haystack() -> str:
    """400 sentences of made-up lower-case words."""
    rng = Random("haystack")
    syllables = [first + vowel for first in "bdfgklmnprst" for vowel in "aeiou"]
    words = ["".join(rng.choice(syllables) for _ in range(rng.choice((2, 3, 4)))) for _ in range(500)]
    sentences: list[str] = []
    for _ in range(400):
        chosen = [rng.choice(words) for _ in range(rng.randint(3, 12))]
        text = " ".join(chosen)[: SENTENCE_BYTES - 2].strip()
        sentences.append(text.capitalize() + ".")
    return " ".join(sentences)
