"""Reading a trace of any form.

Three forms are read:

- YAML of labelled segments (`.yaml`, `.yml`): every request lists the segments of its prompt by name and size;
- JSONL of token ids: `{"tokens": [1, 2, 3], "stream": "main", "timestamp": 0}`; only `tokens` is required;
- Mooncake JSONL: `timestamp`, `input_length`, `output_length` and `hash_ids`, one id for every 512 tokens, or for as
  many as a field `block_size` or the argument `block` says.

Timestamps are milliseconds in all three. Each may be gzipped (`.jsonl.gz`).
"""

from pathlib import Path

from kvcompress.prefix.jsonl import read_jsonl
from kvcompress.prefix.requests import OnError, Trace, TraceError
from kvcompress.prefix.segments import Cut, read_segments


def read_trace(
    path: str | Path,
    *,
    block: int | None = None,
    cut: Cut | None = None,
    on_error: OnError = "stop",
    keep_tokens: bool = False,
) -> Trace:
    """Reads a trace; the suffix and the first line tell its form.

    `block`: tokens in a block; by default what the trace says itself, else 16 for token ids and 512 for Mooncake, whose
    blocks are cut already: there it is a statement, which the trace may not contradict.
    `cut`: how labelled segments become blocks, see `read_segments`. `on_error="skip"` leaves a bad line out and notes
    it in `Trace.skipped`; `"stop"` raises. `keep_tokens` keeps the token ids of a trace that has them.

    Raises `TraceError`, which names file and line; for a file unreadable as a whole, whatever `on_error` says.
    """
    path = Path(path)
    if on_error not in ("stop", "skip"):
        raise TraceError(f"on_error={on_error!r}: expected 'stop' or 'skip'")
    if cut not in (None, "segment", "contiguous"):
        raise TraceError(f"cut={cut!r}: expected 'segment' or 'contiguous'")
    if block is not None and block < 1:
        raise TraceError(f"block={block}: a block holds at least 1 token")
    if not path.is_file():
        raise TraceError(f"{path}: no such file; a trace is a .yaml of labelled segments or a .jsonl, or either as .gz")
    if path.name.removesuffix(".gz").endswith((".yaml", ".yml")):
        return read_segments(path, block=block, cut=cut, on_error=on_error)
    if cut is not None:
        raise TraceError(f"{path}: cut={cut!r} is for labelled segments (.yaml); leave it out")
    return read_jsonl(path, block=block, on_error=on_error, keep_tokens=keep_tokens)
