"""Streaming runs that are stopped go on at the last finished bucket and end as if never stopped."""

import copy
import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvcompress.cli import app
from kvcompress.measure.streaming import StreamRecord
from kvcompress.runs.config import ConfigError, StreamingConfig, read_config
from kvcompress.runs.streaming import StreamFile, run_streaming
from kvcompress.runs.streaming_summary import rich_table, summarise
from tests.breaking import breaking
from tests.tiny import save_tiny

__all__ = ["breaking"]  # a fixture
METHODS = ["streaming_llm(sinks=[0, 2], window=12)", "exact"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[StreamRecord]:
    folder = tmp_path_factory.mktemp("whole")
    records = run_streaming(config(tiny), folder)
    lines = (folder / "streaming.jsonl").read_text()
    assert run_streaming(config(tiny), folder) == records
    assert (folder / "streaming.jsonl").read_text() == lines  # a finished run measures nothing again
    return records


def config(tiny: Path, **changes: object) -> StreamingConfig:
    options = {"protocol": "streaming", "model": str(tiny), "methods": METHODS, "tokens": 80, "bucket": 20}
    options |= {"device": "cpu", "segments": 2, "tokens_per_call": 6, "recompute": {"window": 12, "every": 10}}
    return StreamingConfig(**(options | changes))  # type: ignore[arg-type]


def measured(records: list[StreamRecord]) -> list[object]:
    return [(record.method, record.bucket, record.nll_segments, record.kv_bytes, record.status) for record in records]


class Stop(BaseException):
    """Stands for a kill: nothing in the run catches it."""


@pytest.mark.parametrize("damaged", [False, True])
def test_a_stopped_run_goes_on_at_its_last_bucket(
    tiny: Path, whole: list[StreamRecord], tmp_path: Path, damaged: bool
) -> None:
    def stop_in_the_second_method(text: str, done: int, total: int) -> None:
        if "sinks=2" in text and "60 tokens" in text:
            raise Stop

    with pytest.raises(Stop):
        run_streaming(config(tiny), tmp_path / "cut", stop_in_the_second_method)
    (state,) = (tmp_path / "cut").glob("stream-*.safetensors")
    if damaged:
        state.write_bytes(state.read_bytes()[:-8])
    path = tmp_path / "cut" / "streaming.jsonl"
    before = path.read_text()
    again: list[str] = []
    records = run_streaming(config(tiny), tmp_path / "cut", lambda text, done, total: again.append(text))
    assert measured(records) == measured(whole)
    assert path.read_text().startswith(before)
    # The bucket whose record was written before its cache is measured again, with a damaged cache all of them.
    told = [text.split(": ")[1].split(",")[0] for text in again if "sinks=2" in text]
    assert told == (["20 tokens", "40 tokens"] if damaged else []) + ["60 tokens", "80 tokens"]
    assert not any("sinks=0" in text for text in again)
    assert not list((tmp_path / "cut").glob("stream-*"))


def test_a_method_stops_at_the_memory_limit(tiny: Path, tmp_path: Path) -> None:
    # The exact KV of a token takes 2 segments x 2 layers x 2 heads x 2 x 16 x 4 bytes = 1 KiB.
    limited = config(tiny, memory_limit="30KiB", recompute=None)
    records = run_streaming(limited, tmp_path)
    exact = [record for record in records if record.method == "exact"]
    assert [record.status for record in exact] == ["ok", "ok", "stopped"]
    assert exact[-1].error == "40,960 stored bytes exceed memory_limit 30KiB"
    assert [record.status for record in records if record.method != "exact"] == ["ok"] * 8
    assert run_streaming(limited, tmp_path) == records
    rows = {row.method: row for row in summarise(records)}
    assert rows["exact"].tokens == 40
    assert rows["exact"].quarters[2:] == [None, None]
    assert rows["streaming_llm(sinks=0, window=12)"].growth == 1.0


def test_times_have_a_spread_and_the_table_fits_80_columns(whole: list[StreamRecord]) -> None:
    lines = [copy.copy(line) for line in whole if line.method.startswith("recompute")]
    for line, times in zip(lines, [(1.0, 2.0, 3.0), (1040.0, 1050.0, 1060.0), (1.0, 2.5, 9.0)] * 2, strict=False):
        low, line.ms_per_call, high = times
        line.end, line.kv_bytes, line.ms_per_call_quartiles = line.end * 1000, 999_990_000, [low, high]
    rows = summarise(lines[:3])
    assert rows[0].time_text == "2.5 (1.0–9.0)"
    rows[0].ms_per_call, rows[0].ms_per_call_quartiles = 1050.0, (1040.0, 1060.0)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rich_table(rows, "t"))
    shown = console.export_text()
    assert "(1040–1060)" in shown and "…" not in shown and max(map(len, shown.splitlines())) <= 80
    for record in whole:
        assert record.ms_per_call_quartiles is not None and record.ms_per_call is not None
        low, high = record.ms_per_call_quartiles
        assert low <= record.ms_per_call <= high


def test_a_failed_method_is_tried_again(tiny: Path, tmp_path: Path, breaking: str) -> None:
    bad = config(tiny, methods=[breaking, "exact"], recompute=None, tokens=40)
    records = run_streaming(bad, tmp_path)
    assert [record.status for record in records] == ["failed", "ok", "ok"]
    run_streaming(bad, tmp_path)
    lines = [StreamRecord.from_json(line) for line in (tmp_path / "streaming.jsonl").read_text().splitlines()]
    assert [line.status for line in lines].count("failed") == 2


def test_the_command_prints_the_table_and_writes_the_figure(tiny: Path, tmp_path: Path) -> None:
    settings = tmp_path / "s.yaml"
    settings.write_text(
        f"protocol: streaming\nmodel: {tiny}\ndevice: cpu\ntokens: 60\nbucket: doubling\nmethods: [exact]\n"
    )
    done = CliRunner().invoke(app, ["run", str(settings), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    (record,) = StreamFile(tmp_path / "out").read().values()
    assert f"{record.ppl:.4g}" in (tmp_path / "out" / "summary.md").read_text()
    assert (tmp_path / "out" / "summary.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("protocol: streeming\n", "unknown protocol 'streeming'; did you mean 'streaming'? known: prefix, streaming"),
        ("protocol: streaming\ntokens: 9\nsegmnts: 2\n", "unknown key 'segmnts'; did you mean 'segments'?"),
        ("protocol: streaming\ntokens: 9\nscored: 2\n", "unknown key 'scored'"),
        (
            "protocol: streaming\ntokens: 9\nrecompute: {windw: 2}\n",
            "unknown key 'recompute.windw'; did you mean 'window'",
        ),
        ("protocol: streaming\ntokens: 9\nmemory_limit: 2 apples\n", "memory_limit: budget '2 apples' is not a size"),
        ("protocol: streaming\ntokens: 9\nprefix: 9\n", "prefix 9 leaves nothing of 9 tokens"),
        ("protocol: streaming\n", "the key 'tokens' is missing"),
        ("1: 2\n", "every key must be a text"),
    ],
)
def test_mistakes_name_the_key(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "mistake.yaml"
    path.write_text("model: m\nmethods: [exact]\n" + content)
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert expected in str(error.value)


def test_a_text_that_is_too_short(tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("x" * 200)
    with pytest.raises(ConfigError, match=r"has 200 tokens, but segment 3 of 3 needs tokens 162 to 243"):
        run_streaming(config(tiny, data=str(text), segments=3), tmp_path / "out")
