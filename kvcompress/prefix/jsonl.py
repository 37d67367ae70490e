"""The two JSONL forms of a trace: token ids, and the public Mooncake traces."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from kvcompress.prefix.blocks import block_keys, check_block
from kvcompress.prefix.problems import first_problem
from kvcompress.prefix.requests import OnError, Trace, TraceError
from kvcompress.prefix.trace_file import open_trace

LONGEST_LINE = 8 * 2**20  # bytes, about a million token ids
TOKENS_BLOCK, MOONCAKE_BLOCK = 16, 512  # tokens, where the trace does not say

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

    The format is that of the traces published with Mooncake (arXiv 2407.00079), one hash id for every 512 tokens;
    `block_size` is the field of traces in the same form with other blocks.
    """

    model_config = ConfigDict(frozen=True)

    timestamp: Milliseconds
    input_length: int = Field(strict=True, ge=1)
    output_length: int = Field(strict=True, ge=0)
    hash_ids: list[HashId]
    block_size: Annotated[int, Field(strict=True, ge=1)] | None = None
    stream: str | None = None


def read_jsonl(path: Path, *, block: int | None = None, on_error: OnError = "stop", keep_tokens: bool = False) -> Trace:
    """Reads a JSONL trace; its first readable line tells which of the two forms it has.

    `block`: tokens in a block; by default 16, of a Mooncake trace what it says, or 512. Raises `TraceError`.
    """
    trace: Trace | None = None
    parse: Callable[[bytes], None] | None = None
    skipped: list[str] = []
    for number, line in _lines(path):
        try:
            if line is None:
                raise ValueError(f"longer than {LONGEST_LINE:,} bytes; split the prompt or use hash_ids")
            if trace is None or parse is None:
                mooncake = _is_mooncake(line)
                trace = Trace(
                    path.name, _block(path, block, MooncakeLine.model_validate_json(line) if mooncake else None)
                )
                parse = _mooncake_parser(trace) if mooncake else _token_parser(trace, keep_tokens)
            parse(line)
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


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Line numbers and lines, blank ones left out; None for a line too long to be read into memory."""
    with open_trace(path) as file:
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


def _block(path: Path, block: int | None, first: MooncakeLine | None) -> int:
    """Tokens in a block: `block` if it is given, else what the first line of a Mooncake trace says, or the default."""
    if first is None:
        block = TOKENS_BLOCK if block is None else block
        check_block(block)
        return block
    own = first.block_size
    if block is not None and own not in (None, block):
        raise TraceError(
            f"{path}: block={block}, but this trace is cut into blocks of {own} tokens already; leave block out"
        )
    return own or block or MOONCAKE_BLOCK


def _token_parser(trace: Trace, keep_tokens: bool) -> Callable[[bytes], None]:
    def parse(line: bytes) -> None:
        bare = line.lstrip().startswith(b"[")
        read = TokenLine.model_validate_json(b'{"tokens":' + line + b"}" if bare else line)
        trace.add(
            [(block_keys(read.tokens, trace.block), trace.block)],
            len(read.tokens),
            stream=read.stream,
            seconds=_seconds(read.timestamp),
            token_ids=read.tokens if keep_tokens else None,
        )

    return parse


def _mooncake_parser(trace: Trace) -> Callable[[bytes], None]:
    def parse(line: bytes) -> None:
        read = MooncakeLine.model_validate_json(line)
        if read.block_size not in (None, trace.block):
            raise ValueError(f"block_size: {read.block_size}, but the blocks of this trace hold {trace.block} tokens")
        full, tail = divmod(read.input_length, trace.block)
        expected = full + (tail > 0)
        if len(read.hash_ids) != expected:
            raise ValueError(
                f"hash_ids: {len(read.hash_ids)} ids, but input_length {read.input_length} takes {expected} blocks of "
                f"{trace.block} tokens; for other blocks give --block, or block_size in every line"
            )
        # a longer prompt never meets a block that is not full, so no provider's entry ends there
        runs = [(read.hash_ids[:full], trace.block), (read.hash_ids[full:], tail)]
        trace.add(runs, read.input_length, stream=read.stream, seconds=_seconds(read.timestamp))

    return parse


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
