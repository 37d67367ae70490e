import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kvcompress as kvc
from kvcompress.cli import app
from kvcompress.measure.bench import length_cases, method_cases
from kvcompress.measure.bench.case import Line, NotHere, cases
from kvcompress.measure.bench.filled import dynamic, fill_compressed
from kvcompress.measure.bench.length_cases import write_trace
from kvcompress.measure.speed import paired
from kvcompress.prefix.trace import read_trace
from tests.tiny import tiny_llama


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: str, **made: object) -> tuple[int, str]:
    """Exit code and output of `kvcompress bench` with cases of these names, each a list of lines or an error."""

    def case_of(what: object):
        def run() -> list[Line]:
            if isinstance(what, Exception):
                raise what
            assert isinstance(what, list)
            return what

        return run

    import kvcompress.measure.bench.report  # noqa: F401  (registers the real cases, which are put aside)

    for name in list(cases):
        monkeypatch.delitem(cases, name)
    for name, what in made.items():
        monkeypatch.setitem(cases, name, case_of(what))
    result = CliRunner().invoke(app, ["bench", *arguments])
    return result.exit_code, result.output


def test_check_fails_for_a_missed_limit_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept, no_limit = Line("a", "b", 0.5, 0.5), Line("c", "d", 7.0)
    code, _ = bench(monkeypatch, "--check", "--out", str(tmp_path), one=[kept, no_limit], two=NotHere("no GPU here"))
    written = (tmp_path / "bench.md").read_text()
    assert code == 0 and "not run: no GPU here" in written and "missed" not in written
    missed = Line("e", "f", 0.51, 0.5)
    assert bench(monkeypatch, "--check", one=[kept, missed])[0] == 1
    assert bench(monkeypatch, one=[kept, missed])[0] == 0
    more = Line("g", "h", 0.51, 0.5, more_is_better=True)
    assert bench(monkeypatch, "--check", one=[more])[0] == 0


def test_what_was_measured_before_a_case_fails_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, _ = bench(
        monkeypatch, "--out", str(tmp_path), one=[Line("a | b", "c", 0.25, 0.5)], two=MemoryError("no memory")
    )
    assert code == 1
    written = json.loads((tmp_path / "bench.json").read_text())
    assert [(line["name"], line["value"], line["passed"]) for line in written["lines"]] == [("a | b", 0.25, True)]
    assert r"| a \| b | c | 0.25 | ≤ 0.5 |" in (tmp_path / "bench.md").read_text()


def test_an_unknown_case_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["bench", "decode_stepp"])
    assert isinstance(result.exception, ValueError)
    assert "'decode_stepp'" in str(result.exception) and "decode_step" in str(result.exception)


def test_pairs_run_in_turns_and_the_warm_ones_do_not_count() -> None:
    ran: list[str] = []
    result = paired(lambda: ran.append("own"), lambda: ran.append("other"), torch.device("cpu"), rounds=4, warm=2)
    assert result.rounds == 4 and len(ran) == 12
    assert ran == ["other", "own", "own", "other"] * 3


@pytest.mark.parametrize("method", ["exact", "kivi(bits=2, group_size=16, residual=16)", "streaming_llm(window=20)"])
def test_a_filled_cache_is_the_one_that_a_prefill_leaves(method: str) -> None:
    model = tiny_llama()
    ids = torch.randint(0, model.config.vocab_size, (1, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(ids, use_cache=True).past_key_values
    kv = [(layer.keys, layer.values) for layer in plain.layers]
    with kvc.wrap(model, method) as wrapped:
        prefilled, filled = wrapped.new_cache(), fill_compressed(wrapped, kv)
        wrapped.prefill(ids, cache=prefilled)
        assert filled.seen.tolist() == prefilled.seen.tolist() == [50]
        assert torch.equal(filled.kept(0), prefilled.kept(0))
        assert filled.memory() == prefilled.memory()
        logits = [wrapped(ids[:, :1], cache=cache).logits for cache in (filled, prefilled)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    assert torch.equal(dynamic(model, kv).layers[0].keys, kv[0][0])


def test_the_long_trace_is_a_trace_of_growing_conversations(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", 3000)
    trace = read_trace(tmp_path / "trace.jsonl")
    assert len(trace.requests) == 3000 and not trace.skipped
    lengths = [json.loads(line)["input_length"] for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert trace.tokens == sum(lengths)
    assert len(trace.blocks) < sum(-(-length // 512) for length in lengths) / 2


def test_the_cases_of_length_and_of_appending_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EARLY": 600, "LATE": 1000, "PER_CALL": 200}.items():
        monkeypatch.setattr(length_cases, name, value)
    step, memory = length_cases.streaming_length()
    assert step.value is not None and memory.value == 1  # the same 512 tokens are kept
    monkeypatch.setattr(method_cases, "LARGE", (256, 2, 2, 32))
    monkeypatch.setattr(method_cases, "APPENDED", 40)
    lines = method_cases.append()
    assert [line.name for line in lines] == [
        f"40 tokens appended to 256, {store}" for store in ("dense", "packed 4-bit", "packed 2-bit")
    ]
    assert all(line.value and line.value > 0 for line in lines)
