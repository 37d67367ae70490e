"""The YAML form of a trace: prompts as lists of labelled segments.

block: 128                # tokens
cut: segment              # or contiguous
caps: [60, 90]            # blocks, the capacities to replay
segments: {system: 2900, turn 1: 900, turn 2: 900}
requests:
  - {stream: main, segments: [system, turn 1]}
  - {stream: main, add: [turn 2]}          # the stream's last prompt and this
  - {stream: other, segments: [system, {task: 400}], timestamp: 60000}   # milliseconds
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvcompress.prefix.blocks import check_block
from kvcompress.prefix.jsonl import Milliseconds
from kvcompress.prefix.problems import first_problem, nearest
from kvcompress.prefix.requests import OnError, Run, Trace, TraceError
from kvcompress.prefix.trace_file import open_trace

Cut = Literal["segment", "contiguous"]
Tokens = Annotated[int, Field(strict=True, ge=1)]
Segment = tuple[str, int]  # label, tokens


class SegmentRequest(BaseModel):
    """One entry of `requests`: a whole prompt (`segments`) or what follows the stream's last prompt (`add`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stream: str | None = None
    segments: list[str | dict[str, Tokens]] | None = None
    add: list[str | dict[str, Tokens]] | None = None
    timestamp: Milliseconds | None = None


class SegmentFile(BaseModel):
    """The whole file; `requests` are validated one by one, so that one of them can be left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: str = ""
    block: Tokens = 128
    cut: Cut = "segment"
    caps: list[Annotated[int, Field(strict=True, ge=0)]] = []
    segments: dict[str, Tokens] = {}
    requests: list[Any] = Field(min_length=1)


def read_segments(path: Path, *, block: int | None = None, cut: Cut | None = None, on_error: OnError = "stop") -> Trace:
    """Reads a YAML of labelled segments. A label names one content, wherever it stands.

    `cut="segment"` cuts every segment into blocks by itself, so that its last block may hold fewer tokens than
    `block` and is stored nevertheless. `cut="contiguous"` cuts the prompt as one run of tokens into full blocks and
    stores nothing of the tail, as serving engines do. Both arguments overrule what the file says.

    Raises `TraceError`.
    """
    content, lines = _load(path)
    try:
        file = SegmentFile.model_validate(content)
        if block is not None:
            check_block(block)
    except ValidationError as error:
        raise TraceError(f"{path}: {first_problem(error, SegmentFile.model_fields)}") from None
    trace = Trace(path.name, file.block if block is None else block, labelled=True, caps=list(file.caps))
    sizes, last = dict(file.segments), {}
    for number, entry in zip(lines, file.requests, strict=True):
        try:
            read = SegmentRequest.model_validate(entry)
            prompt = _prompt(read, sizes, last)
            _add(trace, read, prompt, cut or file.cut)
        except ValueError as error:
            names = SegmentRequest.model_fields
            reason = first_problem(error, names) if isinstance(error, ValidationError) else str(error)
            if on_error == "stop":
                raise TraceError(f"{path}:{number}: {reason}") from None
            trace.skipped.append(f"{path}:{number}: {reason}")
            continue
        sizes.update(prompt)
        last[read.stream] = prompt
    if not trace.requests:
        raise TraceError(f"{path}: no requests; all {len(lines)} were left out, the first one: {trace.skipped[0]}")
    return trace


def _load(path: Path) -> tuple[Any, list[int]]:
    """The file's content and the line number of every entry of `requests`."""
    try:
        with open_trace(path) as file:
            loader = yaml.SafeLoader(file)
            try:
                root = loader.get_single_node()
                content = loader.construct_document(root) if root is not None else None
            finally:
                loader.dispose()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else f"{path}"
        raise TraceError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(content, dict) or not isinstance(root, yaml.MappingNode):
        raise TraceError(f"{path}: expected a mapping with the key 'requests'")
    entries = next((value for key, value in root.value if key.value == "requests"), None)
    return content, [node.start_mark.line + 1 for node in entries.value] if entries is not None else []


def _prompt(read: SegmentRequest, sizes: dict[str, int], last: dict[str | None, list[Segment]]) -> list[Segment]:
    if (read.segments is None) == (read.add is None):
        raise ValueError("expected either 'segments' (a whole prompt) or 'add' (what follows the stream's last one)")
    if read.add is not None and read.stream not in last:
        raise ValueError(f"add: stream {read.stream!r} has no prompt yet; give its first one as 'segments'")
    prompt = [] if read.add is None else list(last[read.stream])
    for piece in read.segments or read.add or ():
        if isinstance(piece, dict):
            pairs = list(piece.items())
        elif piece in sizes:
            pairs = [(piece, sizes[piece])]
        else:
            raise ValueError(f"segment {piece!r} has no size{nearest(piece, sizes)}")
        for label, tokens in pairs:
            if sizes.get(label, tokens) != tokens:
                raise ValueError(
                    f"segment {label!r}: {tokens} tokens here, {sizes[label]} before; one label is one content"
                )
            prompt.append((label, tokens))
    if not prompt:
        raise ValueError("an empty prompt")
    return prompt


def _add(trace: Trace, read: SegmentRequest, prompt: list[Segment], cut: Cut) -> None:
    runs = _per_segment(prompt, trace.block) if cut == "segment" else _contiguous(prompt, trace.block)
    tokens = sum(tokens for _, tokens in prompt)
    seconds = None if read.timestamp is None else read.timestamp / 1000
    trace.add(runs, tokens, stream=read.stream, seconds=seconds, segments=prompt)


def _per_segment(prompt: list[Segment], block: int) -> Iterator[Run]:
    for label, tokens in prompt:
        for start in range(0, tokens, block):
            yield [(label, start)], min(block, tokens - start)


def _contiguous(prompt: list[Segment], block: int) -> Iterator[Run]:
    held: list[tuple[str, int, int]] = []  # label, start, stop
    room = block
    for label, tokens in prompt:
        start = 0
        while start < tokens:
            stop = min(tokens, start + room)
            held.append((label, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield [tuple(held)], block
                held, room = [], block
