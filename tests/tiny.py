"""A tiny random llama with a byte-level tokenizer, in memory or as a folder that a config can name."""

from functools import cache
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.evals.tiny import byte_level


@cache
def tiny_llama() -> LlamaForCausalLM:
    """Two layers, 4 query and 2 KV heads, D = 16; initialised widely enough that attention is not uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def save_tiny(folder: Path) -> Path:
    """The same model and its tokenizer as a folder."""
    tiny_llama().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=byte_level()).save_pretrained(folder)
    return folder
