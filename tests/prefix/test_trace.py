"""The three forms of a trace, good lines and bad ones."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.prefix.jsonl import LONGEST_LINE
from kvcompress.prefix.policies import Unlimited, replay
from kvcompress.prefix.requests import prompt_tokens
from kvcompress.prefix.trace import TraceError, read_trace

GOOD = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
SEGMENTS = """
block: 4
segments: {system: 6, turn 1: 5, turn 2: 3}
requests:
  - {stream: a, segments: [system, turn 1]}
  - {stream: a, add: [turn 2]}
  - {stream: b, segments: [system, {task: 2}]}
"""


def write(folder: Path, name: str, lines: list) -> Path:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def read_text(folder: Path, text: str, **options):
    path = folder / "trace.yaml"
    path.write_text(text)
    return read_trace(path, **options)


def test_mooncake_lines(tmp_path: Path) -> None:
    """Two prompts share two full blocks; the tail of 76 tokens is a block, but no place for a cache entry."""
    longer = {"timestamp": 1500, "input_length": 1536, "output_length": 0, "hash_ids": [7, 8, 11], "extra": "kept out"}
    trace = read_trace(write(tmp_path, "t.jsonl", [GOOD, "", longer]))
    first, second = trace.requests
    assert trace.block == 512
    assert first.blocks[:2] == second.blocks[:2] and first.blocks[2] != second.blocks[2]
    assert [trace.blocks.end[block] for block in first.blocks] == [512, 1024, 1100]
    assert first.positions == first.blocks[:2] and second.positions == second.blocks
    assert (first.tokens, second.tokens, first.seconds, second.seconds) == (1100, 1536, 0.0, 1.5)
    assert replay(trace, Unlimited()).recomputed == 1100 + 512


SMALL_BLOCKS = {"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [7, 8, 9]}


@pytest.mark.parametrize(("own", "given"), [({}, 16), ({"block_size": 16}, None), ({"block_size": 16}, 16)])
def test_mooncake_lines_with_other_blocks(tmp_path: Path, own: dict, given: int | None) -> None:
    longer = {**SMALL_BLOCKS, "input_length": 64, "hash_ids": [7, 8, 11, 12]}
    trace = read_trace(write(tmp_path, "t.jsonl", [{**SMALL_BLOCKS, **own}, {**longer, **own}]), block=given)
    first, second = trace.requests
    assert trace.block == 16
    assert [trace.blocks.end[block] for block in first.blocks] == [16, 32, 40]
    assert first.positions == first.blocks[:2] == second.blocks[:2] and second.positions == second.blocks
    assert replay(trace, Unlimited()).recomputed == 40 + 32


def test_blocks_of_two_sizes_are_refused(tmp_path: Path) -> None:
    sized = {**SMALL_BLOCKS, "block_size": 16}
    with pytest.raises(TraceError, match="block=512, but this trace is cut into blocks of 16 tokens"):
        read_trace(write(tmp_path, "t.jsonl", [sized]), block=512)
    path = write(tmp_path, "t.jsonl", [sized, {**sized, "block_size": 8, "input_length": 24}, SMALL_BLOCKS])
    with pytest.raises(TraceError, match=r":2: block_size: 8, but the blocks of this trace hold 16 tokens"):
        read_trace(path)
    assert len(read_trace(path, on_error="skip").requests) == 2


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.gz", "day.yaml.gz"])
def test_gzipped_traces_read_as_unpacked(tmp_path: Path, name: str) -> None:
    plain = tmp_path / name.removesuffix(".gz")
    plain.write_text(SEGMENTS if "yaml" in name else json.dumps(GOOD) + "\n" + json.dumps(GOOD))
    packed = tmp_path / name
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read_trace(packed).requests) == list(read_trace(plain).requests)
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(TraceError, match=rf"{name}: gzipped, but damaged or cut short"):
        read_trace(packed)


BAD_LINES: dict[str, tuple[str, list]] = {
    "mooncake": ("t.jsonl", [{**GOOD, "timestamp": 900}, {**GOOD, "timestamp": 400, "hash_ids": [70, 80, 90]}]),
    "tokens": ("t.jsonl", [{"tokens": [1] * 64, "timestamp": 9}, {"tokens": [2] * 64, "timestamp": 4}]),
}


@pytest.mark.parametrize("form", BAD_LINES)
def test_what_is_left_out_leaves_no_blocks(tmp_path: Path, form: str) -> None:
    """The same trace without the bad line is the same trace: blocks, places, streams."""
    name, (good, bad) = BAD_LINES[form]
    skipped = read_trace(write(tmp_path, name, [good, bad, good]), on_error="skip")
    without = read_trace(write(tmp_path, "w.jsonl", [good, good]))
    assert len(skipped.skipped) == 1
    assert len(skipped.blocks) == len(without.blocks) and list(skipped.requests) == list(without.requests)


def test_a_request_of_segments_that_is_left_out_leaves_no_blocks(tmp_path: Path) -> None:
    text = "block: 4\nrequests:\n  - {segments: [{a: 6}], timestamp: 9}\n"
    late = read_text(tmp_path, text + "  - {segments: [{b: 7}], timestamp: 4}\n", on_error="skip")
    without = read_text(tmp_path, text)
    assert len(late.skipped) == 1
    assert (len(late.blocks), len(late.positions)) == (len(without.blocks), len(without.positions)) == (2, 1)


def test_hash_ids_of_any_size_name_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones lie in an array, large ones in a dict."""
    monkeypatch.setattr("kvcompress.prefix.blocks.NUMBERED", 100)
    lines = [{**GOOD, "hash_ids": ids} for ids in ([99, 100, 1], [99, 100, 2], [2**63, 0, 1])]
    trace = read_trace(write(tmp_path, "t.jsonl", lines))
    assert [request.blocks for request in trace.requests] == [[0, 1, 2], [0, 1, 3], [4, 5, 6]]


def test_a_hash_after_another_prefix_is_another_block(tmp_path: Path) -> None:
    moved = {**GOOD, "input_length": 1024, "hash_ids": [8, 7]}
    trace = read_trace(write(tmp_path, "t.jsonl", [GOOD, moved]))
    assert not set(trace.requests[0].blocks) & set(trace.requests[1].blocks)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=10), min_size=1, max_size=8), st.integers(1, 4))
def test_token_ids_share_what_their_prefixes_share(tmp_path_factory, prompts: list[list[int]], block: int) -> None:
    path = write(tmp_path_factory.mktemp("t"), "t.jsonl", [{"tokens": prompt} for prompt in prompts])
    trace = read_trace(path, block=block, keep_tokens=True)
    for i, one in enumerate(trace.requests):
        assert one.tokens == len(prompts[i])
        assert prompt_tokens(trace, one, 2) == prompts[i]
        for j, two in enumerate(trace.requests):
            same = sum(a == b for a, b in zip(one.blocks, two.blocks, strict=False))
            shared = next(
                (n for n, (a, b) in enumerate(zip(prompts[i], prompts[j], strict=False)) if a != b),
                min(one.tokens, two.tokens),
            )
            assert same == shared // block


def test_token_ids_may_be_bare_lists_and_have_other_names(tmp_path: Path) -> None:
    lines = [" [5, 6, 7]", {"input_ids": [5, 6, 8]}, {"token_ids": [5, 6], "stream": "s", "timestamp": 250}]
    trace = read_trace(write(tmp_path, "t.jsonl", lines), block=2)
    assert [request.blocks for request in trace.requests] == [[0], [0], [0]]
    assert trace.requests[2].stream == "s" and trace.requests[2].seconds == 0.25
    assert not trace.names_streams


BAD = {
    '{"timestamp": 1, "output_length": 1, "hash_ids": [1]}': "input_length: missing",
    '{"timestamp": 1, "input_length": -4, "output_length": 1, "hash_ids": []}': "input_length: .*not -4",
    '{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}': "input_length: .*not 0",
    '{"timestamp": 1, "input_length": 9, "output_length": -1, "hash_ids": [1]}': "output_length: .*not -1",
    '{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}': "1 ids, but input_length 513 takes 2",
    '{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [1.5]}': r"hash_ids\[0\]: .*not 1.5",
    '{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [-1]}': r"hash_ids\[0\]: .*not -1",
    '{"timestamp": NaN, "input_length": 9, "output_length": 1, "hash_ids": [1]}': "timestamp: .*finite",
    '{"timestamp": 1, "input_length": "9", "output_length": 1, "hash_ids": [1]}': "input_length: .*not '9'",
    '{"tokens": [1, 2]}': "timestamp: missing",
    "[1, 2]": "valid dictionary|object",
    '{"timestamp": 1,': "Invalid JSON",
    "not json": "Invalid JSON",
    '{"timestamp": -1, "input_length": 9, "output_length": 1, "hash_ids": [1]}': "timestamp: .*not -1",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_mooncake_line_is_named_and_left_out_on_demand(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, "t.jsonl", [GOOD, line, GOOD])
    with pytest.raises(TraceError, match=rf"t\.jsonl:2: .*({BAD[line]})"):
        read_trace(path)
    trace = read_trace(path, on_error="skip")
    assert [request.tokens for request in trace.requests] == [1100, 1100]
    assert len(trace.skipped) == 1 and trace.skipped[0].startswith(f"{path}:2: ")


def test_a_line_of_ten_megabytes_is_named_and_left_out_on_demand(tmp_path: Path) -> None:
    huge = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [' + "1," * 5_000_000 + "1]}"
    path = write(tmp_path, "t.jsonl", [GOOD, huge, GOOD])
    with pytest.raises(TraceError, match=rf"t\.jsonl:2: longer than {LONGEST_LINE:,} bytes"):
        read_trace(path)
    assert [request.tokens for request in read_trace(path, on_error="skip").requests] == [1100, 1100]


def test_a_trace_out_of_order_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "t.jsonl", [{**GOOD, "timestamp": 900}, {**GOOD, "timestamp": 400}])
    with pytest.raises(TraceError, match=r":2: timestamp 400 lies before 900"):
        read_trace(path)
    assert len(read_trace(path, on_error="skip").requests) == 1


@pytest.mark.parametrize("tokens", [[], [-1], [2**32], ["1"], [1.0], [True]])
def test_a_bad_token_line_is_named(tmp_path: Path, tokens: list) -> None:
    path = write(tmp_path, "t.jsonl", [{"tokens": [1]}, {"tokens": tokens}])
    with pytest.raises(TraceError, match=r"t\.jsonl:2: tokens"):
        read_trace(path)


def test_files_unreadable_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match=r"no requests"):
        read_trace(write(tmp_path, "empty.jsonl", [""]))
    with pytest.raises(TraceError, match=r"all 2 lines were left out, the first one: .*:1: neither form"):
        read_trace(write(tmp_path, "odd.jsonl", [{"a": 1}, {"b": 1}]), on_error="skip")
    with pytest.raises(
        TraceError, match=r":1: hash_ids: 3 ids, but input_length 1100 takes 69 blocks of 16 tokens; for"
    ):
        read_trace(write(tmp_path, "t.jsonl", [GOOD]), block=16)
    with pytest.raises(TraceError, match=r"cut='segment' is for labelled segments"):
        read_trace(write(tmp_path, "t.jsonl", [GOOD]), cut="segment")


def test_segments_are_cut_one_by_one(tmp_path: Path) -> None:
    trace = read_text(tmp_path, SEGMENTS)
    a1, a2, b = trace.requests
    ends = [[trace.blocks.end[block] for block in request.blocks] for request in trace.requests]
    assert ends == [[4, 6, 10, 11], [4, 6, 10, 11, 14], [4, 6, 8]]
    assert a2.blocks[:4] == a1.blocks and b.blocks[:2] == a1.blocks[:2] and b.blocks[2] not in a2.blocks
    assert [trace.positions.label[name] for name in a2.positions] == ["system", "turn 1", "turn 2"]
    assert [trace.positions.end[name] for name in a2.positions] == [6, 11, 14]


def test_segments_as_one_run_are_cut_into_full_blocks(tmp_path: Path) -> None:
    """As token ids would be: the made-up tokens of each prompt, read back, share the same blocks."""
    trace = read_text(tmp_path, SEGMENTS, cut="contiguous")
    prompts = [prompt_tokens(trace, request, 10**6) for request in trace.requests]
    assert [len(prompt) for prompt in prompts] == [11, 14, 8]
    same = read_trace(write(tmp_path, "same.jsonl", [{"tokens": prompt} for prompt in prompts]), block=4)
    assert [request.blocks for request in trace.requests] == [request.blocks for request in same.requests]
    assert [request.blocks for request in trace.requests] == [[0, 1], [0, 1, 2], [0, 3]]


BAD_REQUESTS = {
    "{stream: a, segmnets: [system]}": "segmnets: unknown key; did you mean 'segments'?",
    "{stream: a}": "expected either 'segments' .* or 'add'",
    "{stream: a, segments: [system], add: [turn 2]}": "expected either 'segments' .* or 'add'",
    "{stream: new, add: [turn 2]}": "stream 'new' has no prompt yet",
    "{stream: a, segments: [sytem]}": "segment 'sytem' has no size; did you mean 'system'?",
    "{stream: a, segments: [{system: 7}]}": "segment 'system': 7 tokens here, 6 before",
    "{stream: a, segments: [{other: 0}]}": r"segments\[0\].other: .* not 0",
    "{stream: a, segments: []}": "an empty prompt",
    "{stream: a, segments: system}": "segments: .*list",
    "just text": "dictionary|SegmentRequest",
}


@pytest.mark.parametrize("request_text", BAD_REQUESTS)
def test_a_bad_request_is_named_and_left_out_on_demand(tmp_path: Path, request_text: str) -> None:
    text = f"{SEGMENTS}  - {request_text}\n  - {{stream: a, segments: [turn 1]}}\n"
    with pytest.raises(TraceError, match=rf"trace\.yaml:8: .*({BAD_REQUESTS[request_text]})"):
        read_text(tmp_path, text)
    trace = read_text(tmp_path, text, on_error="skip")
    assert [request.tokens for request in trace.requests] == [11, 14, 8, 5]
    assert len(trace.skipped) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blok: 4\nrequests: [{segments: [{a: 1}]}]", "blok: unknown key; did you mean 'block'?"),
        ("block: 0\nrequests: [{segments: [{a: 1}]}]", "block: .*not 0"),
        ("block: 4", "requests: missing"),
        ("requests: []", "requests: "),
        ("- 1", "expected a mapping with the key 'requests'"),
        ("a: [1", "1: not valid YAML"),
        ("requests: [{segments: [{a: 1}]}]\ncut: half", "cut: .*'segment' or 'contiguous'"),
        ("", "expected a mapping"),
    ],
)
def test_a_bad_file_of_segments_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=rf"trace\.yaml.*{message}"):
        read_text(tmp_path, text, on_error="skip")


def test_a_trace_holds_a_few_bytes_for_each_block(tmp_path: Path) -> None:
    lines, fresh = [], 0
    for number in range(1000):
        shared = lines[number // 2]["hash_ids"][:12] if lines else []
        lines.append(
            {**GOOD, "input_length": 512 * 24 - 1, "hash_ids": shared + list(range(fresh, fresh + 24))[len(shared) :]}
        )
        fresh += 24
    path = write(tmp_path, "t.jsonl", lines)
    read_trace(path)
    tracemalloc.start()
    try:
        trace = read_trace(path)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(trace.blocks) == 24 + 12 * 999
    # 4 bytes where a prompt names a block, 16 for a block's parent, end and hash id each; arrays have room to grow.
    assert held < 1.5 * (4 * 24 * 1000 + 16 * len(trace.blocks) + 4 * fresh + 40 * 1000) + 20_000
