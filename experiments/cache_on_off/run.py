"""Greedy decoding with the KV cache off and on: token passes, time per token, and the text.

    python experiments/cache_on_off/run.py            # 5 + 500 tokens, time without a cache at every 25th
    python experiments/cache_on_off/run.py --every 1  # every step without a cache as well: some 20 minutes

Writes results.json and cache_on_off.png beside itself. Passes are counted at the model's embedding, not worked out.
Times are CPU time of one thread, so that other work on the machine disturbs them little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import kvcompress as kvc
from kvcompress.models import load_model, load_tokenizer

HERE = Path(__file__).parent
PROMPT = "Once upon a time there"


@contextmanager
def counting(model: PreTrainedModel) -> Iterator[list[int]]:
    """Collects how many tokens go through the model in each forward pass."""
    passes: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: passes.append(args[0].numel()))
    try:
        yield passes
    finally:
        hook.remove()


def with_cache(model: PreTrainedModel, prompt: Tensor, new: int) -> tuple[Tensor, list[int], list[float]]:
    """The prompt and `new` greedy tokens [1, N], the tokens and the seconds of every forward pass."""
    seconds, ids = [], prompt
    with counting(model) as passes, kvc.wrap(model, "exact") as wrapped:
        cache = wrapped.new_cache()
        for step in range(new):
            start = time.process_time()
            output = wrapped.prefill(ids, cache=cache) if step == 0 else wrapped(ids[:, -1:], cache=cache)
            ids = torch.cat([ids, output.logits[:, -1].argmax(-1, keepdim=True)], 1)
            seconds.append(time.process_time() - start)
    return ids, passes, seconds


@torch.no_grad()
def without_cache(
    model: PreTrainedModel, text: Tensor, prompt: int, every: int
) -> tuple[int, list[int], list[int], list[float]]:
    """Steps of decoding `text` [1, N] without a cache, the first `every` ones and every `every`-th.

    Returns how many of the steps gave the same token as in `text`, their lengths, tokens and seconds.
    """
    same, lengths, seconds = 0, [], []
    steps = [
        length for length in range(prompt, text.shape[1]) if length < prompt + every or not (length - prompt) % every
    ]
    with counting(model) as passes:
        for length in steps:
            start = time.process_time()
            token = model(text[:, :length], use_cache=False, logits_to_keep=1).logits[0, -1].argmax()
            seconds.append(time.process_time() - start)
            lengths.append(length)
            same += int(token == text[0, length])
    return same, lengths, passes, seconds


def counted_passes(prompt: int, new: int) -> dict[str, int]:
    """Tokens that go through a model of one tiny layer in all steps, without a cache and with one."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=1, n_head=1, vocab_size=64, bos_token_id=None, eos_token_id=None)
    ).eval()
    text, on, _ = with_cache(model, torch.arange(prompt)[None], new)
    same, _, off, _ = without_cache(model, text, prompt, every=1)
    return {"off": sum(off), "on": sum(on), "same_tokens": same}


def measure(model: PreTrainedModel, prompt: Tensor, new: int, every: int) -> dict[str, Any]:
    """Both ways for one model. Steps without a cache start from the text with one, which they must reproduce."""
    text, on, on_seconds = with_cache(model, prompt, new)
    same, lengths, off, off_seconds = without_cache(model, text, prompt.shape[1], every)
    early, late = slice(1, 1 + new // 4), slice(new - new // 4, new)
    return {
        "passes_on": sum(on),
        "passes_off_measured": sum(off),
        "steps_off_measured": len(off),
        "steps_with_the_same_token": same,
        "lengths_on": [prompt.shape[1] + step for step in range(new)],
        "ms_on": [1000 * each for each in on_seconds],
        "lengths_off": lengths,
        "ms_off": [1000 * each for each in off_seconds],
        "median_ms_on_first_quarter": 1000 * statistics.median(on_seconds[early]),
        "median_ms_on_last_quarter": 1000 * statistics.median(on_seconds[late]),
        "text": text[0].tolist(),
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """One panel a model: milliseconds per token against the tokens so far."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(results["models"]), squeeze=False)[0]
    for axes, (name, measured) in zip(panels, results["models"].items(), strict=True):
        axes.plot(measured["lengths_off"], measured["ms_off"], ".-", label="cache off: the whole text again")
        axes.plot(measured["lengths_on"][1:], measured["ms_on"][1:], linewidth=1, label="cache on: one token")
        axes.set(title=name, xlabel="tokens so far", ylabel="CPU ms per token", xlim=(0, None), ylim=(0, None))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    FigureCanvasAgg(figure).print_png(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=500, help="tokens to generate")
    parser.add_argument("--every", type=int, default=25, help="measure every so many steps without a cache")
    parser.add_argument("--models", nargs="+", default=["gpt2-small-shaped", "smollm2-135m"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"new": options.new, "every": options.every, "models": {}}
    for name in options.models:
        if name == "gpt2-small-shaped":
            torch.manual_seed(0)
            model, prompt = GPT2LMHeadModel(GPT2Config()).eval(), torch.tensor([[5, 17, 301, 4242, 31337]])
        else:
            model, tokenizer = load_model(name, device="cpu"), load_tokenizer(name)
            prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
        measured = results["models"][name] = measure(model, prompt, options.new, options.every)
        counted = counted_passes(prompt.shape[1], options.new)
        measured["passes"] = counted
        print(
            f"{name}: {prompt.shape[1]} + {options.new} tokens, {counted['off']:,} token passes off, "
            f"{counted['on']:,} on; "
            f"{measured['steps_with_the_same_token']} of {measured['steps_off_measured']} steps give the same token; "
            f"on {measured['median_ms_on_first_quarter']:.1f} ms in the first quarter, "
            f"{measured['median_ms_on_last_quarter']:.1f} in the last; "
            f"off {measured['ms_off'][0]:.1f} ms at {measured['lengths_off'][0]} tokens, "
            f"{measured['ms_off'][-1]:.1f} at {measured['lengths_off'][-1]}"
        )
    (HERE / "results.json").write_text(json.dumps(results) + "\n")
    draw(results, HERE / "cache_on_off.png")


if __name__ == "__main__":
    main()
