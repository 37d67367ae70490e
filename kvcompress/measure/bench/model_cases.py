"""Decode steps, prefills and stored bytes of the built-in model, against transformers' own caches."""

from __future__ import annotations

from functools import cache
from statistics import quantiles

import torch
from torch import Tensor
from transformers import PreTrainedModel, QuantizedCache

from kvcompress.fingerprint import Watch, weights_fingerprint
from kvcompress.measure.bench.attention_cases import line
from kvcompress.measure.bench.case import Line, NotHere, case
from kvcompress.measure.bench.filled import dynamic, fill_compressed, fill_plain, random_kv, shape_of
from kvcompress.measure.bench.peak import peak_of_prefill
from kvcompress.measure.speed import paired, timed
from kvcompress.methods.base import Method
from kvcompress.models import ModelNotFound, load_model
from kvcompress.text_form import parse
from kvcompress.wrapping import wrap

MODEL = "smollm2-135m"
EIGHT = [
    "exact",
    "streaming_llm(sinks=4, window=508)",
    "h2o(heavy=256, recent=256)",
    "snapkv(budget=512)",
    "snapkv(budget=256)",
    "kivi(bits=4)",
    "kivi(bits=2)",
    "snapkv(budget=0.5) | kivi(bits=2)",
]


@cache
def model(dtype: str = "float32") -> PreTrainedModel:
    try:
        return load_model(MODEL, dtype, "auto")
    except ModelNotFound as error:
        raise NotHere(str(error)) from None


def plain_step(cache: object) -> object:
    """One decode step of the plain model over one of transformers' caches."""
    with torch.no_grad():
        return model()(torch.tensor([[42]], device=model().device), past_key_values=cache, use_cache=True)


def plain_prefill(ids: Tensor) -> object:
    """The plain model over a prompt, with its own cache."""
    with torch.no_grad():
        return model()(ids, use_cache=True, logits_to_keep=1)


def prompt(tokens: int) -> Tensor:
    """Random ids [1, tokens], the same for the same length."""
    ids = torch.randint(0, model().config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    return ids.to(model().device)


@case
def decode_step() -> list[Line]:
    """One decode step at 8,192 tokens: exact and KIVI-2 against DynamicCache, KIVI against QuantizedCache."""
    kv = random_kv(model(), 8192)
    lines = []
    for method, limit in (("exact", 1 / 1.6), ("kivi(bits=2)", 1 / 1.8)):
        lines.append(_step_against(method, kv, "DynamicCache", dynamic(model(), kv), limit))
    for bits, backend, limit in ((2, "hqq", 1 / 3), (2, "quanto", None), (4, "hqq", None), (4, "quanto", None)):
        method, name = f"kivi(bits={bits})", f"QuantizedCache {backend}, {bits} bits"
        try:
            rival = QuantizedCache(backend, model().config, nbits=bits, residual_length=128)
            fill_plain(rival, kv)
        except (ImportError, ValueError) as error:
            lines.append(Line(f"decode step at 8192, {method}", name, None, skipped=str(error)))
            continue
        lines.append(_step_against(method, kv, name, rival, limit))
    return lines


def _step_against(method: str, kv: list, name: str, rival: object, limit: float | None, rounds: int = 9) -> Line:
    token = torch.tensor([[42]], device=model().device)
    wrapper = wrap(model(), method)
    with wrapper:
        own_cache = fill_compressed(wrapper, kv)
    result = paired(
        lambda: wrapper(token, cache=own_cache),
        lambda: plain_step(rival),
        model().device,
        rounds=rounds,
        around_own=wrapper,
    )
    return line(f"decode step at {kv[0][0].shape[2]}, {method}", name, result, limit)


@case
def short_context() -> list[Line]:
    """Wrapping with `exact` at 64 tokens against the plain model."""
    kv = random_kv(model(), 64)
    return [_step_against("exact", kv, "DynamicCache", dynamic(model(), kv), 1.03, rounds=61)]


@case
def h2o_prefill() -> list[Line]:
    """H2O's prefill of 4,096 tokens against the plain one: time, and peak memory in fresh processes."""
    ids = prompt(4096)
    wrapper = wrap(model(), "h2o(heavy=256, recent=256)")
    result = paired(
        lambda: wrapper.prefill(ids), lambda: plain_prefill(ids), model().device, rounds=3, warm=1, around_own=wrapper
    )
    peaks = {name: peak_of_prefill(MODEL, name, 4096) for name in ("plain", "h2o(heavy=256, recent=256)")}
    above = (peaks["h2o(heavy=256, recent=256)"] - peaks["plain"]) / 2**20
    return [
        line("H2O prefill at 4096", "plain SDPA prefill", result, 1.4),
        Line("H2O prefill at 4096, peak above the plain one (MiB)", "plain SDPA prefill", above, 64, detail=peaks),
    ]


@case
def snapkv_compression() -> list[Line]:
    """SnapKV's compression as a share of the prefill that it follows."""
    low, middle, high = compression_share(parse("snapkv(budget=512)"), prompt(4096), rounds=3)
    return [Line("SnapKV compression at 4096", "its prefill", middle, 0.03, low=low, high=high)]


def compression_share(method: Method, ids: Tensor, rounds: int) -> tuple[float, float, float]:
    """Quartiles of the time that `method` takes to compress a prompt over that of the prefill before it."""
    shares = []
    with wrap(model(), "exact") as wrapped:
        rotaries = wrapped.rotaries() if method.position_mode == "cache" else None
        for _ in range(1 + rounds):
            gathered = wrapped.new_cache(gather_for=[method])
            with timed(model().device) as prefill:
                wrapped.prefill(ids, cache=gathered)
            with timed(model().device) as compression:
                gathered.compress_as(method, rotaries)
            shares.append(compression.seconds / prefill.seconds)
    low, middle, high = quantiles(shares[1:], n=4, method="inclusive")  # the first one warms up
    return low, middle, high


@case
def stored_bytes() -> list[Line]:
    """Stored bytes, spare apart, over codes, scales, minima and residual."""
    layers, heads, dim = shape_of(model())
    lines = []
    for tokens in (4096, 8192):
        kv = random_kv(model(), tokens)
        for bits in (2, 4):
            with wrap(model(), f"kivi(bits={bits})") as wrapped:
                cache = fill_compressed(wrapped, kv)
            stored = cache.nbytes - cache.memory()["spare"]
            keys, values = tokens - tokens % 128, tokens - 128
            codes = (keys + values) * dim * bits // 8
            scales = keys // 32 * dim * 4 + values * (dim // 32) * 4
            full = (2 * tokens - keys - values) * dim * model().dtype.itemsize
            arithmetic = layers * heads * (codes + scales + full)
            lines.append(Line(f"stored bytes, kivi(bits={bits}) at {tokens}", "arithmetic", stored / arithmetic, 1.02))
    return lines


@case
def shared_prefill() -> list[Line]:
    """One prefill shared by eight methods against eight prefills and compressions."""
    ids = prompt(2048)
    methods = [parse(text) for text in EIGHT]
    with wrap(model(), "exact") as wrapped:
        rotaries, gathered = wrapped.rotaries(), wrapped.new_cache(gather_for=methods)
        with timed(model().device) as together:
            wrapped.prefill(ids, cache=gathered)
            for method in methods:
                gathered.compress_as(method, rotaries if method.position_mode == "cache" else None)
    apart = 0.0
    for method in methods:
        with wrap(model(), method) as wrapper:
            cache = wrapper.new_cache()
            with timed(model().device) as alone:
                wrapper.prefill(ids, cache=cache)
            apart += alone.seconds
    detail = {"own_s": together.seconds, "other_s": apart}
    ratio = together.seconds / apart
    return [Line("one prefill for 8 methods at 2048", "8 prefills", ratio, 0.3, detail=detail)]


@case
def fingerprint() -> list[Line]:
    """Reading all weights for the fingerprint, against copying them; looking for changes, against a decode step."""
    weights = [weight.detach() for weight in model().parameters()]
    watch, cache = Watch(model()), dynamic(model(), random_kv(model(), 64))
    watch.fingerprint()
    whole = paired(
        lambda: weights_fingerprint(model()),
        lambda: [weight.clone() for weight in weights],
        model().device,
        rounds=5,
        warm=1,
    )
    look = paired(watch.fingerprint, lambda: plain_step(cache), model().device)
    size = f"{sum(weight.nbytes for weight in weights) / 1e6:,.0f} MB in {len(weights)} weights"
    return [
        line(f"fingerprint, {size}", "copying the weights", whole, None),
        line(f"a look for changes, {len(weights)} weights", "decode step at 64, DynamicCache", look, 0.02),
    ]
