"""A model's KV size as plain values, and as a table."""

from collections import Counter
from typing import Any

from rich.table import Table

from kvcompress.prefix.sizes import KVSize, MethodSize


def describe(model: str, size: KVSize, context: int | None, batch: int, budget: int, method: str) -> dict[str, Any]:
    """What `kvcompress size` prints, in bytes, tokens and sequences; `budget` in bytes.

    `context=None` stands for the longest the model was made for. Raises `ValueError`.
    """
    length = (size.longest_context or 1) if context is None else context
    if length < 1:
        raise ValueError(f"context {length}: expected at least 1 token")
    under = MethodSize(size, method)
    return {
        "model": model,
        "model_type": size.model_type,
        "attention": size.attention,
        "dtype": size.dtype,
        "layers": dict(Counter(_kind(layer.kind, layer.window) for layer in size.layers)),
        "values_per_token": size.values_per_token,
        "bytes_per_token": size.bytes_per_token,
        "bytes_per_token_at_length": size.bytes_per_token_at_length,
        "state_bytes": size.state_bytes,
        "method": method,
        "context": length,
        "batch": batch,
        "bytes": under.bytes_at(length, batch),
        "grows_while_decoding": under.method.grows,
        "budget_bytes": budget,
        "tokens_within_budget": under.tokens_within(budget, batch),
        "users_within_budget": under.users_within(budget, length),
    }


def render_size(facts: dict[str, Any]) -> Table:
    """The table for `describe`'s values."""
    table = Table(title=f"{facts['model']} ({facts['model_type']}, {facts['attention']}, {facts['dtype']})")
    table.add_column("what")
    table.add_column("size", justify="right")
    table.add_row("layers", ", ".join(f"{count} {kind}" for kind, count in facts["layers"].items()))
    table.add_row("values per token", f"{facts['values_per_token']:,}")
    table.add_row("bytes per token", f"{facts['bytes_per_token']:,}")
    if facts["bytes_per_token_at_length"] != facts["bytes_per_token"]:
        table.add_row("bytes per token, windows full", f"{facts['bytes_per_token_at_length']:,}")
    if facts["state_bytes"]:
        table.add_row("state per sequence, any length", _bytes(facts["state_bytes"]))
    table.add_row(
        f"{facts['batch']:,} × {facts['context']:,} tokens, {facts['method']}",
        f"{facts['bytes']:,} ({_bytes(facts['bytes'])})",
    )
    table.add_row("with every token that is decoded", "grows" if facts["grows_while_decoding"] else "no more than that")
    longest = facts["tokens_within_budget"]
    each = "tokens" if facts["batch"] == 1 else f"tokens for each of {facts['batch']:,}"
    table.add_row(
        f"{each} that fit into {_bytes(facts['budget_bytes'])}", "any number" if longest is None else f"{longest:,}"
    )
    users = facts["users_within_budget"]
    table.add_row(f"users of {facts['context']:,} tokens that fit", "any number" if users is None else f"{users:,}")
    return table


def _kind(kind: str, window: int | None) -> str:
    return kind if window is None else f"{kind} (last {window:,})"


def _bytes(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"
