"""The two JSONL forms of a trace: token ids, and the public Mooncake traces."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from kvcompress.prefix.blocks import block_keys, check_block
from kvcompress.prefix.problems import first_problem
from kvcompress.prefix.requests import OnError, Request, Trace, TraceError

LONGEST_LINE = 8 * 2**20  # bytes, about a million token ids
MOONCAKE_BLOCK = 512  # tokens

Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
HashId = Annotated[int, Field(strict=True, ge=0)]


class TokenLine(BaseModel):
    """A prompt as token ids; `timestamp` in milliseconds. Other fields are ignored."""

    model_config = ConfigDict(frozen=True)

    tokens: list[TokenId] = Field(min_length=1, validation_alias=AliasChoices("tokens", "token_ids", "input_ids"))
    stream: str | None = None
    timestamp: Milliseconds | None = None


class MooncakeLine(BaseModel):
    """One line of a Mooncake trace: `timestamp` in milliseconds, lengths in tokens. Other fields are ignored.

    The format is that of the traces published with Mooncake (arXiv 2407.00079).
    """

    model_config = ConfigDict(frozen=True)

    timestamp: Milliseconds
    input_length: int = Field(strict=True, ge=1)
    output_length: int = Field(strict=True, ge=0)
    hash_ids: list[HashId]
    stream: str | None = None


def read_jsonl(path: Path, *, block: int | None = None, on_error: OnError = "stop", keep_tokens: bool = False) -> Trace:
    """Reads a JSONL trace; its first readable line tells which of the two forms it has.

    `block`: tokens in a block, 16 by default; a Mooncake trace is cut into 512 already. Raises `TraceError`.
    """
    with _no_garbage_collection():
        return _read(path, block, on_error, keep_tokens)


def _read(path: Path, block: int | None, on_error: OnError, keep_tokens: bool) -> Trace:
    trace: Trace | None = None
    parse: Callable[[bytes], Request] | None = None
    skipped: list[str] = []
    for number, line in _lines(path):
        try:
            if line is None:
                raise ValueError(f"longer than {LONGEST_LINE:,} bytes; split the prompt or use hash_ids")
            if trace is None or parse is None:
                mooncake = _is_mooncake(line)
                trace = Trace(path.name, _block(path, block, mooncake))
                trace.positions = trace.blocks
                parse = _mooncake_parser(trace) if mooncake else _token_parser(trace, keep_tokens)
            trace.add(parse(line))
        except TraceError:
            raise
        except ValueError as error:
            reason = first_problem(error, ()) if isinstance(error, ValidationError) else str(error)
            if on_error == "stop":
                raise TraceError(f"{path}:{number}: {reason}") from None
            skipped.append(f"{path}:{number}: {reason}")
    if trace is None or not trace.requests:
        left_out = f"; all {len(skipped)} lines were left out, the first one: {skipped[0]}" if skipped else ""
        raise TraceError(f"{path}: no requests{left_out}")
    trace.skipped = skipped
    return trace


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Reading makes millions of lists and no cycles; looking for cycles would take a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Line numbers and lines, blank ones left out; None for a line too long to be read into memory."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) <= LONGEST_LINE:
                if not line.isspace():
                    yield number, line
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)
            yield number, None


def _is_mooncake(line: bytes) -> bool:
    first = from_json(line)
    if isinstance(first, list):
        return False
    if isinstance(first, dict):
        if {"hash_ids", "input_length", "output_length"} & first.keys():
            return True
        if {"tokens", "token_ids", "input_ids"} & first.keys():
            return False
    raise ValueError(
        'neither form of a JSONL trace: expected {"tokens": [...]} or '
        '{"timestamp": ..., "input_length": ..., "output_length": ..., "hash_ids": [...]}'
    )


def _block(path: Path, block: int | None, mooncake: bool) -> int:
    if not mooncake:
        block = 16 if block is None else block
        check_block(block)
        return block
    if block not in (None, MOONCAKE_BLOCK):
        raise TraceError(
            f"{path}: block={block}, but the hash_ids of a Mooncake trace stand for {MOONCAKE_BLOCK} tokens"
        )
    return MOONCAKE_BLOCK


def _token_parser(trace: Trace, keep_tokens: bool) -> Callable[[bytes], Request]:
    def parse(line: bytes) -> Request:
        bare = line.lstrip().startswith(b"[")
        read = TokenLine.model_validate_json(b'{"tokens":' + line + b"}" if bare else line)
        blocks = trace.blocks.add_all(-1, block_keys(read.tokens, trace.block), trace.block)
        kept = read.tokens if keep_tokens else None
        return Request(blocks, blocks, len(read.tokens), read.stream, _seconds(read.timestamp), kept)

    return parse


def _mooncake_parser(trace: Trace) -> Callable[[bytes], Request]:
    def parse(line: bytes) -> Request:
        read = MooncakeLine.model_validate_json(line)
        full, tail = divmod(read.input_length, MOONCAKE_BLOCK)
        expected = full + (tail > 0)
        if len(read.hash_ids) != expected:
            raise ValueError(
                f"hash_ids: {len(read.hash_ids)} ids, but input_length {read.input_length} takes {expected} "
                f"blocks of {MOONCAKE_BLOCK} tokens"
            )
        blocks = trace.blocks.add_all(-1, read.hash_ids[:full], MOONCAKE_BLOCK)
        # a longer prompt never meets a block that is not full, so no provider's entry ends there
        positions = blocks
        if tail:
            positions = blocks.copy()
            blocks.append(trace.blocks.add(blocks[-1] if blocks else -1, read.hash_ids[-1], tail))
        return Request(blocks, positions, read.input_length, read.stream, _seconds(read.timestamp))

    return parse


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
