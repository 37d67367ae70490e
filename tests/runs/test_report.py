"""A report says what the folders hold, leaves out what cannot be trusted, and needs nothing but itself."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from kvcompress.cli import app
from kvcompress.evals.results import EvalResult, SampleResult
from kvcompress.measure.record import Record
from kvcompress.measure.statistics import PairedDifference
from kvcompress.measure.streaming import StreamRecord
from kvcompress.runs.config import RunConfig
from kvcompress.runs.details import read_details
from kvcompress.runs.figures import drawing, plot_lines
from kvcompress.runs.report.figures import quality_figure
from kvcompress.runs.report.quality import Comparison, Point, divergences, family, perplexities, task_scores
from kvcompress.runs.report.reading import ReportError, read_results
from kvcompress.runs.report.sections import ranking, sections
from kvcompress.runs.report.sinks import send
from kvcompress.runs.report.writing import commands, write_report
from kvcompress.runs.runner import run
from kvcompress.runs.streaming_summary import by_method, curve, figure, spreads
from tests.tiny import save_tiny

METHODS = [
    "exact",
    "snapkv(budget=16, window=8)",
    "streaming_llm(sinks=2, window=14)",
    "kivi(group_size=8, residual=16)",
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a real run: 8 samples, the fewest that are ranked."""
    tiny, out = save_tiny(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("run")
    run(RunConfig(model=str(tiny), methods=[*METHODS], prefix=40, scored=6, samples=8, device="cpu"), out)
    return out


def record(method: str, sample: int, nll: float, kv_bytes: int = 100, kl: float = 0.1) -> Record:
    made = Record(method, "m", "float32", "cpu", sample, "", 40, 6, f"hash of {method}", nll=nll, ppl=math.exp(nll))
    made.nll_exact, made.ppl_exact, made.kl = 1.0, math.e, kl
    made.kv_bytes, made.kv_bytes_exact, made.memory_ratio, made.memory_ratio_16bit = kv_bytes, 400, 400 / kv_bytes, 2.0
    made.kept_tokens, made.top1_agreement, made.decode_ms_per_token, made.decode_ms_per_token_exact = 10, 0.5, 3.0, 2.0
    made.evicted, made.packed, made.decode_ratios = method != "exact", False, [1.4, 1.5, 1.9]
    return made


def write_records(folder: Path, records: list[Record]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "records.jsonl").write_text("".join(each.to_json() + "\n" for each in records))
    return folder


def task_result(method: str, scores: list[float], kv_bytes: float = 100.0) -> EvalResult:
    samples = [SampleResult(number, score, kv_bytes, 400.0, 200.0, True) for number, score in enumerate(scores)]
    return EvalResult(
        f"key {method}", "m", "print", "needle", "1", method, 0, len(scores), 0, "", {"metadata": {"length": 64}},
        query_aware=True, metric="acc", higher_is_better=True, score=sum(scores) / len(scores), stderr=0.1,
        samples=samples, compressed=len(scores), kv_bytes=kv_bytes, memory_ratio=4.0, memory_ratio_16bit=2.0,
    )  # fmt: skip


def write_task(folder: Path, result: EvalResult, depths: list[float], lengths: list[int]) -> None:
    for name in ("results", "lm_eval"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    name = f"{result.task}-{re.sub('[^a-z0-9]', '_', result.method)}.json"
    (folder / "results" / name).write_text(result.to_json())
    documents = [
        {"doc_id": number, "doc": {"depth": depth, "target_length": length, "family": "needle"}}
        for number, (depth, length) in enumerate(zip(depths, lengths, strict=True))
    ]
    (folder / "lm_eval" / name).write_text(json.dumps({"samples": {"needle": documents}}))


class Page(HTMLParser):
    """What a browser would fetch, show and announce."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[int] = []
        self.images: list[dict[str, str | None]] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "img":
            self.images.append(found)
        self.ids += [found["id"]] if found.get("id") else []
        self.fetched += [value for name, value in attrs if name in ("src", "href", "srcset") and value]


def test_the_page_needs_nothing_else(measured: Path, tmp_path: Path) -> None:
    paths = write_report(read_results([measured]), tmp_path)
    text = paths[0].read_text()
    page = Page(text)
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in page.fetched)
    assert "@import" not in text and "url(" not in text
    assert {address[1:] for address in page.fetched if address[0] == "#"} <= set(page.ids)
    assert page.images and all(image["alt"] for image in page.images)
    assert page.headings[0] == 1 and page.headings.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(page.headings, page.headings[1:], strict=False))
    markdown = paths[1].read_text()
    pictures = re.findall(r"\]\((report/[^)]+)\)", markdown)
    assert len(pictures) == len(page.images)
    assert all((tmp_path / picture).is_file() for picture in pictures)


def test_its_numbers_are_those_of_the_records(measured: Path, tmp_path: Path) -> None:
    results = read_results([measured])
    assert results.skipped == []
    page, markdown, table = write_report(results, tmp_path)
    rows = pyarrow.parquet.read_table(table).to_pylist()
    lines = [json.loads(line) for line in (measured / "records.jsonl").read_text().splitlines()]
    assert [(row["method"], row["sample"], row["kl"]) for row in rows] == [
        (line["method"], line["sample"], line["kl"]) for line in lines
    ]
    kl = [line["kl"] for line in lines if line["method"].startswith("kivi")]
    assert f"| {sum(kl) / len(kl):.4f} |" in markdown.read_text()
    assert f"kvcompress run {measured / 'config.yaml'} --out {measured}" in markdown.read_text()
    assert lines[0]["config_hash"] in page.read_text()


def test_details_are_those_of_the_records(measured: Path) -> None:
    for each in read_results([measured]).records:
        details = read_details(measured, *each.key)
        assert details is not None and each.kl is not None
        assert float(details.kl.mean()) == pytest.approx(each.kl, abs=1e-6)
        assert len(details.kept) == (2 if each.sample == 0 else 0)
        if details.kept and each.method.startswith("streaming_llm"):
            assert details.kept[1].tolist() == [[0, 1, *range(26, 40)]] * 2


def test_the_front_is_what_none_beats_in_both() -> None:
    made = []
    for method, nll, size in (("exact", 1.0, 400), ("a", 1.2, 200), ("b", 1.4, 300), ("c", 1.5, 100)):
        made += [record(method, sample, nll + 0.01 * sample, size) for sample in range(8)]
    comparison = perplexities(made)
    assert not comparison.left_out
    assert [point.method for point in comparison.points if point.on_front] == ["exact", "a", "c"]
    point = comparison.points[1]
    assert point.value == pytest.approx(math.exp(1.235))  # exp of the mean NLL, the mean of 0.00 to 0.07 being 0.035
    assert point.low is not None and point.high is not None
    assert point.low < point.value < point.high


def test_rounding_is_neither_better_nor_worse() -> None:
    """A method that changes nothing differs from exact by the last bits of fp32."""
    made = [record("a", sample, 1.0 - 1e-7, kl=-3e-9) for sample in range(8)]
    for comparison in (perplexities(made), divergences(made)):
        difference = comparison.points[0].difference
        assert isinstance(difference, PairedDifference)
        assert (difference.verdict, difference.ties, difference.low, difference.high) == ("undecided", 8, 0, 0)
        assert f"{comparison.points[0].low:.4f}" in ("0.0000", "2.7183")


def test_too_few_samples_are_not_ranked() -> None:
    comparison = divergences([record("a", sample, 1.0) for sample in range(7)])
    assert comparison.left_out == {"a": "n=7 is too few to rank, needs at least 8"}
    assert ranking(comparison) == "KL (nats): not ranked (n=7 is too few to rank, needs at least 8)."
    assert not any(point.on_front or point.low is not None for point in comparison.points)


def test_a_method_with_too_few_samples_leaves_the_others_ranked() -> None:
    """The one with 7 samples would beat all others, and stands beside them."""
    made = [record(method, sample, 1.0, kl=kl) for method, kl in (("a", 0.5), ("b", 0.6)) for sample in range(8)]
    made += [record("few", sample, 1.0, kl=0.1) for sample in range(7)]
    comparison = divergences(made)
    assert [(point.method, point.on_front) for point in comparison.points] == [
        ("a", True),
        ("b", False),
        ("few", False),
    ]
    assert ranking(comparison) == (
        "KL (nats): on the Pareto front are `a`. Not ranked: `few` (n=7 is too few to rank, needs at least 8)."
    )


def test_a_task_is_ranked_by_paired_differences() -> None:
    exact, other = task_result("exact", [1.0] * 8, 400.0), task_result("a", [1.0] * 6 + [0.0] * 2)
    comparison = task_scores([exact, other])
    point = comparison.points[1]
    assert (point.value, point.on_front) == (0.75, True)
    assert point.low is not None and point.high is not None and point.low < 0.75 <= point.high <= 1.0
    few = task_scores([task_result("exact", [1.0] * 3), task_result("a", [1.0] * 3)])
    assert not few.ranked and few.left_out["a"].startswith("n=3 is too few")


def test_the_heat_map_says_where_the_answer_stood(tmp_path: Path) -> None:
    for method in ("exact", "a"):
        # Depths 0 and 1, lengths 64 and 128: "a" finds only what stands at the end.
        scores = [1.0, 1.0, 1.0, 1.0] if method == "exact" else [0.0, 1.0, 0.0, 1.0]
        write_task(tmp_path, task_result(method, scores), [0.0, 1.0, 0.0, 1.0], [64, 64, 128, 128])
    found = next(each for each in sections(read_results([tmp_path])) if each.title == "Where the answer stood")
    (figure,) = found.sections[0].figures
    assert "a: 64 tokens 0.50, 128 tokens 0.50" in figure.alt
    assert "exact: 64 tokens 1.00, 128 tokens 1.00" in figure.alt
    assert "the question inside" in found.sections[0].title


def test_families() -> None:
    assert family("snapkv(budget=0.25) | kivi(bits=2)") == "snapkv | kivi"
    assert family("streaming_llm(positions='original', window=60)") == "streaming_llm, original positions"


def test_what_cannot_be_trusted_is_left_out_with_a_reason(measured: Path, tmp_path: Path) -> None:
    lines = (measured / "records.jsonl").read_text().splitlines()
    edited, ratio, old, mistyped, other = (json.loads(line) for line in lines[:5])
    edited["ppl"] = 3.0
    ratio["kv_bytes"] = 1
    old["versions"]["kvcompress"] = "0.0.9"
    mistyped["kl"] = "small"
    other["tokens_prefix"], other["sample"] = 41, 99
    changed = [json.dumps(each) for each in (edited, ratio, old, mistyped, other)]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text((measured / "config.yaml").read_text())
    (folder / "records.jsonl").write_text("\n".join([*changed, *lines[5:], lines[0][:50]]))
    (folder / "details").mkdir()
    record_5 = Record.from_json(lines[5])
    (folder / "details" / f"{record_5.config_hash}-{record_5.sample}.npz").write_bytes(b"PK")
    results = read_results([folder])
    assert len(results.records) == len(lines) - 5
    reasons = "\n".join(results.skipped)
    for expected in (
        "line 1: edited: ppl 3 is not exp of nll",
        "line 2: edited: memory_ratio",
        "line 3: measured by kvcompress 0.0.9, this is",
        "line 4: not a whole record: kl: Input should be a valid number",
        f"line {len(lines) + 1}: half-written: the run was stopped here",
        "1 records of another setting than config.yaml: prefix 41 instead of 40",
        f"{record_5.config_hash}-{record_5.sample}.npz is damaged",
    ):
        assert expected in reasons
    page, markdown, _ = write_report(results, tmp_path / "out")
    assert "half-written: the run was stopped here" in page.read_text()
    assert "half-written: the run was stopped here" in markdown.read_text()


def test_edited_and_half_written_task_results_are_left_out(tmp_path: Path) -> None:
    for method in ("exact", "a", "b"):
        write_task(tmp_path, task_result(method, [1.0] * 8), [0.5] * 8, [64] * 8)
    paths = sorted((tmp_path / "results").iterdir())
    paths[0].write_text(paths[0].read_text().replace('"score": 1.0,', '"score": 0.9,', 1))
    paths[1].write_text(paths[1].read_text()[:200])
    results = read_results([tmp_path])
    assert [task.result.method for task in results.tasks] == ["exact"]
    assert "checksum" in results.skipped[0]
    assert str(paths[1]) in results.skipped[1]


def test_tasks_of_two_limits_stand_apart(tmp_path: Path) -> None:
    for limit in (8, 2):
        for method in ("exact", "a"):
            result = task_result(method, [1.0] * limit)
            result.key, result.limit, result.data_hash = f"{method} {limit}", limit, f"hash of {limit}"
            result.settings["metadata"]["samples"] = limit
            write_task(tmp_path / str(limit), result, [0.5] * limit, [64] * limit)
    found = {each.title: each for each in sections(read_results([tmp_path / "8", tmp_path / "2"]))}
    parts = found["Tasks"].sections
    title = "needle with m, the question inside the compressed part, length 64, seed 0, limit"
    assert [part.title for part in parts] == [f"{title} 8", f"{title} 2"]
    assert [[row[0].text for row in part.tables[0].rows] for part in parts] == [["a", "exact"]] * 2
    assert "on the Pareto front" in parts[0].text[0] and "n=2 is too few" in parts[1].text[0]
    places = found["Where the answer stood"].sections
    assert [part.title.rpartition(", ")[2] for part in places] == ["limit 8", "limit 2"]


def test_records_that_differ_in_anything_else_stand_apart(tmp_path: Path) -> None:
    """By their own words where these tell them apart, by a hash where nothing else does."""
    changes = [{}, {"chunk": 16}, {"chunk": 16, "weights": "other"}]
    folders = []
    for number, change in enumerate(changes):
        made = [record(method, sample, 1.0) for method in ("exact", "a") for sample in range(2)]
        for each in made:
            each.settings = {"chunk": None, "weights": "those", **change}
            each.config_hash += str(number)
        folders.append(write_records(tmp_path / str(number), made))
    found = {each.title: each for each in sections(read_results(folders))}
    parts = found["Quality against stored bytes"].sections
    titles = ["chunk None, weights those", "chunk 16, weights those", "chunk 16, weights other"]
    assert [part.title.partition("scored, ")[2] for part in parts] == titles
    assert len(parts) == 3 and len({part.anchor for part in parts}) == 3
    assert [[row[-1].text for row in part.tables[0].rows] for part in parts] == [["2", "2"]] * 3
    (both,) = sections(read_results(folders[:2]))[:1]
    assert [part.title.partition("scored, ")[2] for part in both.sections] == ["chunk None", "chunk 16"]
    (both,) = sections(read_results(folders[1:]))[:1]
    assert [part.title.partition("scored, ")[2] for part in both.sections] == ["weights those", "weights other"]


def test_times_are_the_same_in_table_and_chart(tmp_path: Path) -> None:
    made = [record("a", 0, 1.0), record("a", 1, 1.0)]
    made[0].decode_ratios, made[1].decode_ratios = [1.0, 2.0, 3.0], [4.0, 5.0]
    found = {each.title: each for each in sections(read_results([write_records(tmp_path, made)]))}
    table = found["Quality against stored bytes"].sections[0].tables[0]
    shown = dict(zip(table.head, table.rows[0], strict=True))
    assert shown["decode × exact"].text == "3.00 (2.00–4.00)"
    assert "a 3.00 (2.00–4.00) behind 40 tokens" in found["Decode time"].sections[0].figures[0].alt
    assert (shown["× smaller"].text, shown["at 16 bit"].text, shown["compressed"].text) == ("4.00", "2.00", "yes")


def test_without_pyarrow_the_pages_are_written(measured: Path, tmp_path: Path) -> None:
    """Nor is lm-eval needed."""
    code = "import sys; sys.modules.update(pyarrow=None, lm_eval=None); from kvcompress.cli import main; main()"
    command = [sys.executable, "-c", code, "report", str(measured), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no report.parquet: pyarrow is not installed; install kvcompress[report]" in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report", "report.html", "report.md"}


def test_a_stopped_stream_says_so(tmp_path: Path) -> None:
    head = ("m", "float32", "cpu", "data")
    lines = [StreamRecord("exact", *head, "h", index, 10 * index, 10 * index + 10, 1, 1) for index in range(3)]
    for line in lines[:2]:
        line.nll, line.ppl, line.tokens_scored, line.kv_bytes, line.ms_per_call = 1.0, math.e, 10, 100, 2.0
        line.ms_per_call_quartiles = [1.5, 3.0 + line.bucket]
    lines[2].status, lines[2].error = "stopped", "too much"
    (tmp_path / "streaming.jsonl").write_text("".join(line.to_json() + "\n" for line in lines))
    (section,) = sections(read_results([tmp_path]))
    part = section.sections[0]
    assert part.points == ["`exact` after 20 tokens: stopped: too much"]
    assert [cell.text for cell in part.tables[0].rows[0]] == [
        "exact",
        "20",
        "–",
        "2.718",
        "–",
        "2.718",
        "0.00",
        "x1.00",
        "2.0 (1.5–3.5)",
    ]
    assert part.tables[0].rows[0][-1].value == 2.0
    perplexity, _, times = part.figures
    assert "exact 2 (1.5–3) and 2 (1.5–4)" in times.alt and "upright lines are quartiles" in times.caption
    assert "(" not in perplexity.alt.partition("(largest")[0] and "quartiles" not in perplexity.caption


def test_upright_lines_are_the_quartiles() -> None:
    """What is drawn in report and summary; a method whose older records have none gets none."""
    head = ("m", "float32", "cpu", "data")
    made = [StreamRecord(method, *head, method, i, i, i + 1, 1, 1) for method in ("a", "old") for i in range(2)]
    for line in made:
        line.nll, line.ppl, line.tokens_scored, line.kv_bytes, line.ms_per_call = 1.0, math.e, 10, 100, 2.0
        line.ms_per_call_quartiles = [1.5, 3.0 + line.bucket] if line.method == "a" else None
    groups = by_method(made)
    found = spreads(groups)
    assert found == {"a": [(1.5, 3.0), (1.5, 4.0)]}
    _, (axes,) = drawing()
    lines = {method: curve(group, "ms_per_call", 1.0) for method, group in groups.items()}
    plot_lines(axes, lines, "x", "y", spreads=found)
    (upright,) = axes.collections
    assert [part.tolist() for part in upright.get_segments()] == [[[1, 1.5], [1, 3.0]], [[2, 1.5], [2, 4.0]]]
    without = [dataclasses.replace(line, ms_per_call_quartiles=None) for line in made]
    assert figure(made, "t") != figure(without, "t")


def test_what_lies_in_two_folders_counts_once(tmp_path: Path) -> None:
    one = write_records(tmp_path / "one", [record("a", 0, 1.0), record("a", 1, 1.0)])
    two = write_records(tmp_path / "two", [record("a", 1, 2.0)])
    results = read_results([one, two, one])
    assert [(each.sample, each.nll) for each in results.records] == [(0, 1.0), (1, 2.0)]
    assert commands(results).splitlines()[-1] == f"kvcompress report {one} {two}"


def test_the_command_makes_the_same_tasks_again(tmp_path: Path) -> None:
    write_task(tmp_path, task_result("exact", [1.0]), [0.5], [64])
    write_task(tmp_path, task_result("kivi(bits=2)", [1.0]), [0.5], [64])
    line = commands(read_results([tmp_path])).splitlines()[0]
    assert line == (
        "kvcompress eval --model m --tasks needle --methods 'exact,kivi(bits=2)' --limit 1 --seed 0 "
        "--metadata '{\"length\": 64}'"
    )


@pytest.mark.parametrize(("name", "expected"), [("nowhere", "there is no such folder"), (".", "no results there")])
def test_nothing_to_report_is_a_mistake(tmp_path: Path, name: str, expected: str) -> None:
    with pytest.raises(ReportError, match=expected):
        read_results([tmp_path / name])


def test_the_command_line(measured: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(measured), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "report.html").is_file()


def test_sinks(tmp_path: Path) -> None:
    results = read_results([write_records(tmp_path / "one", [record("a", 0, 1.0)])])
    with pytest.raises(ReportError, match="unknown sink 'mlflow'; known: trackio, wandb"):
        send(results, "mlflow")
    try:
        import trackio  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        with pytest.raises(ReportError, match="trackio is not installed"):
            send(results, "trackio")


def test_a_family_has_the_same_marker_whatever_else_a_figure_shows() -> None:
    comparison = Comparison("acc", True, [Point("kivi(bits=4)", 1e6, 0.5)], None)
    first, second = (
        quality_figure("task-0", "", comparison, families).png for families in (["exact", "kivi"], ["kivi", "exact"])
    )
    assert first != second
    assert first == quality_figure("task-1", "", comparison, ["exact", "kivi", "h2o"]).png
