"""A trace replayed through a real `PrefixCache`: real KV of a tiny model, beside what the simulation says.

Prompts are prefilled a block at a time, so that a stored block is bitwise what any prompt would compute for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvcompress.methods.exact import Exact
from kvcompress.prefix.blocks import block_keys
from kvcompress.prefix.policies import LeastRecentlyUsed, replay
from kvcompress.prefix.prefix_cache import PrefixCache
from kvcompress.prefix.requests import Trace, prompt_tokens
from kvcompress.wrapping import wrap

VOCABULARY = 256

Progress = Callable[[int, int], None]
"""Told how many prompts are done, and how many there are."""


@dataclass(frozen=True)
class RealOutcome:
    """What one capacity did over a trace.

    `cap`: blocks, None if nothing had to be evicted. `recomputed`: tokens that were computed, of `tokens`;
    `simulated`: the same from the simulated leaf-LRU. `bytes_held`: the most that was stored at one time.
    `difference`: the largest difference of any last logit from that of the same prompt computed whole, in the same
    chunks; `largest_logit` says how large they are.
    """

    cap: int | None
    tokens: int
    recomputed: int
    simulated: int
    bytes_held: int
    difference: float
    largest_logit: float


@dataclass
class RealReplay:
    """What `real_replay` did. `model`: the model in words."""

    block: int
    model: str
    outcomes: list[RealOutcome] = field(default_factory=list)


def real_replay(trace: Trace, caps: Sequence[int | None], progress: Progress = lambda done, total: None) -> RealReplay:
    """Prefills every prompt of `trace` over a prefix cache of each capacity, in blocks of `trace.block` tokens.

    Blocks run through a prompt without regard for its segments, and only full ones are stored. Token ids are the
    trace's own, or drawn so that what is shared in the trace is shared here.
    """
    own_ids = [max(request.token_ids) for request in trace.requests if request.token_ids]
    vocabulary = max([VOCABULARY, *(largest + 1 for largest in own_ids)])
    prompts = [torch.tensor([prompt_tokens(trace, request, vocabulary)]) for request in trace.requests]
    model = tiny_model(vocabulary, max(prompt.shape[1] for prompt in prompts))
    contiguous = _contiguous(trace, prompts)
    done, total = 0, len(prompts) * (1 + len(caps))
    expected: list[Tensor] = []
    with wrap(model, Exact()) as wrapped:
        for prompt in prompts:
            expected.append(wrapped.prefill(prompt, chunk=trace.block).logits)
            done += 1
            progress(done, total)
    report = RealReplay(
        trace.block, f"a random llama of {model.config.num_hidden_layers} layers, {str(model.dtype)[6:]}"
    )
    for cap in caps:
        blocks = len(contiguous.blocks) if cap is None else cap
        store = PrefixCache(model, capacity=blocks * trace.block, block=trace.block, checkpoint=trace.block)
        held, difference = 0, 0.0
        with wrap(model, Exact(), prefix_cache=store) as wrapped:
            for prompt, logits in zip(prompts, expected, strict=True):
                found = wrapped.prefill(prompt, chunk=trace.block).logits
                difference = max(difference, float((found - logits).abs().max()))
                held = max(held, store.nbytes)
                done += 1
                progress(done, total)
        counts = store.counts
        simulated = replay(contiguous, LeastRecentlyUsed(blocks, leaf_first=True), reserve=1).recomputed
        largest = max(float(logits.abs().max()) for logits in expected)
        report.outcomes.append(
            RealOutcome(cap, counts.tokens, counts.tokens - counts.reused, simulated, held, difference, largest)
        )
    return report


def tiny_model(vocabulary: int, longest: int) -> LlamaForCausalLM:
    """A random llama, the same on every call: 2 layers, 2 query heads and 1 KV head of 16 dims."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max(longest, 2048),
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 1.5 / weight.shape[-1] ** 0.5)
    return model.eval()


def _contiguous(trace: Trace, prompts: Sequence[Tensor]) -> Trace:
    """The same prompts in full blocks of tokens alone, as they are stored, for the simulation."""
    found = Trace(trace.name, trace.block)
    for prompt in prompts:
        keys = block_keys(prompt[0].tolist(), trace.block)
        found.add([(keys, trace.block)], prompt.shape[1])
    return found
