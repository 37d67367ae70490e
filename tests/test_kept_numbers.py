"""Numbers in README and the experiments' pages are those of the files kept beside them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvcompress.measure.record import Record
from kvcompress.text_form import parse

ROOT = Path(__file__).parents[1]
SPEED, LINEAGE, REFERENCE = (ROOT / "experiments" / name for name in ("speed", "lineage", "reference_points"))

AT_8192, AT_1024 = "decode step at 8192, ", "decode step at 1024, batch 1, float32, "
CHUNKS = "peak of 32768 tokens in chunks of 1024, "
# Of each sentence a part in which # stands for a number, and the lines of bench.json that give it: name, rival.
SENTENCES = {
    ROOT / "README.md": {
        "takes # of the time with transformers' DynamicCache under `exact`": [(f"{AT_8192}exact", "DynamicCache")],
        "and # under `kivi(bits=2)`, which is # of that with the 2-bit HQQ cache": [
            (f"{AT_8192}kivi(bits=2)", "DynamicCache"),
            (f"{AT_8192}kivi(bits=2)", "QuantizedCache hqq, 2 bits"),
        ],
        "`exact` takes #, `streaming_llm` # and `h2o`, which evicts in every head at every step, # of it": [
            (f"{AT_1024}exact", "DynamicCache"),
            (f"{AT_1024}streaming_llm(window=508)", "DynamicCache"),
            (f"{AT_1024}h2o(heavy=256, recent=256)", "DynamicCache"),
        ],
    },
    SPEED / "README.md": {
        "takes # of the time with DynamicCache under `exact`": [(f"{AT_8192}exact", "DynamicCache")],
        "and # under `kivi(bits=2)`. That is # of the time with the 2-bit HQQ cache and # of that with quanto's": [
            (f"{AT_8192}kivi(bits=2)", rival)
            for rival in ("DynamicCache", "QuantizedCache hqq, 2 bits", "QuantizedCache quanto, 2 bits")
        ],
        "of a layer takes # of DynamicCache's time, and # to # with packing": [
            (f"256 tokens appended to 16384, {kind}", "DynamicCache")
            for kind in ("dense", "packed 2-bit", "packed 4-bit")
        ],
        "H2O's prefill of 4,096 tokens takes # times the plain one": [("H2O prefill at 4096", "plain SDPA prefill")],
        "one prefill for eight methods takes # of eight": [("one prefill for 8 methods at 2048", "8 prefills")],
        "peaks at # of DynamicCache's memory under StreamingLLM, # under H2O and # under KIVI; "
        "SnapKV, which waits for the prompt's end, peaks at #": [
            (f"{CHUNKS}{method}", "DynamicCache")
            for method in (
                "streaming_llm(sinks=4, window=1020)",
                "h2o(heavy=512, recent=512)",
                "kivi(bits=2)",
                "snapkv(budget=1024)",
            )
        ],
        "2-bit attention takes # of SDPA over dense fp32 (limit 0.25; of bf16 it takes #, limit 0.4)": [
            ("packed 2-bit decode attention, S=16384 H=8 G=4 D=128", rival) for rival in ("SDPA fp32", "SDPA bf16")
        ],
        "Dense attention takes # of SDPA for 8 KV heads of 128": [
            ("dense fp32 decode attention, S=16384 H=8 G=4 D=128", "SDPA fp32")
        ],
        "and # for 3 KV heads of 64": [("dense fp32 decode attention, S=8192 H=3 G=3 D=64", "SDPA fp32")],
        "`exact` at 64 tokens takes # of the plain model": [("decode step at 64, exact", "DynamicCache")],
        "at 1,024 tokens a step takes # under StreamingLLM": [(f"{AT_1024}streaming_llm(window=508)", "DynamicCache")],
        "and # under H2O, which chooses": [(f"{AT_1024}h2o(heavy=256, recent=256)", "DynamicCache")],
    },
}


def one_line(path: Path) -> str:
    return " ".join(path.read_text().split())


def with_numbers(sentence: str) -> str:
    """A pattern of the sentence in which each # is a number."""
    return re.escape(sentence).replace(r"\#", r"(\d+(?:\.\d+)?)")


def bench_lines() -> dict[tuple[str, str], dict[str, Any]]:
    lines = json.loads((SPEED / "bench.json").read_text())["lines"]
    return {(line["name"], line["against"]): line for line in lines}


@pytest.mark.parametrize(("page", "sentence"), [(page, part) for page, parts in SENTENCES.items() for part in parts])
def test_speeds_are_those_of_the_kept_run(page: Path, sentence: str) -> None:
    (found,) = re.finditer(with_numbers(sentence), one_line(page))
    lines = bench_lines()
    for number, line in zip(found.groups(), SENTENCES[page][sentence], strict=True):
        decimals = len(number.partition(".")[2])
        assert float(number) == round(lines[line]["value"], decimals), line


def test_the_table_of_the_speeds_shows_the_kept_values() -> None:
    text = (SPEED / "bench.md").read_text().replace("\\|", "|")
    for (name, rival), line in bench_lines().items():
        if line["value"] is not None:
            assert f"| {name} | {rival} | {line['value']:.3g}" in text


def test_reference_points_are_those_of_the_kept_records() -> None:
    lines = (REFERENCE / "records.jsonl").read_text().splitlines()
    records = {record.method: record for record in map(Record.from_json, lines)}
    rows = [row.split(" | ") for row in (REFERENCE / "README.md").read_text().splitlines() if row.startswith("| `")]
    assert len(rows) == len(records) == 10
    for method, ppl, _, kl, _, top1, _, size in rows:
        kept = records[str(parse(method.strip("| `")))]
        assert kept.ppl is not None and kept.kl is not None and kept.top1_agreement is not None
        assert (ppl, top1, size.strip(" |")) == (f"{kept.ppl:.3f}", f"{kept.top1_agreement:.3f}", f"{kept.kv_bytes:,}")
        assert kl == ("0" if method == "| `exact`" else f"{kept.kl:.4f}")


def lineage_table(title: str) -> dict[str, dict[str, str]]:
    """The first table of a section of the kept report: by method, what stands under each head."""
    section = (LINEAGE / "report.md").read_text().partition(f"\n### {title}")[2].partition("\n### ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    head, *others = [re.split(r"(?<!\\) \| ", row.strip("| ")) for row in rows]
    return {cells[0].strip("`").replace("\\|", "|"): dict(zip(head, cells, strict=True)) for cells in others}


def test_what_lineage_found_on_text_is_in_its_report() -> None:
    """To three decimals; the report has four, so that a last 5 may have been rounded either way."""
    kl = {method: float(row["KL (nats)"]) for method, row in lineage_table("smollm2-135m, float32").items()}
    quarter = sorted(kl[f"{name}(budget=0.25)"] for name in ("streaming_llm", "h2o", "snapkv"))
    packed, alone = kl["snapkv(budget=0.5) | kivi(bits=4)"], kl["snapkv(budget=0.5)"]
    for sentence, values in {
        "`kivi(bits=4)` has a KL of # nats": [kl["kivi(bits=4)"]],
        "a KL of # is more than that of evicting three quarters of the tokens (# to #)": [
            kl["kivi(bits=2)"],
            quarter[0],
            quarter[-1],
        ],
        "half of the prompt (KL # and #), and the farthest at a tenth (#; StreamingLLM #, SnapKV #)": [
            kl[f"{method})"]
            for method in (
                "h2o(budget=0.25",
                "h2o(budget=0.5",
                "h2o(budget=0.1",
                "streaming_llm(budget=0.1",
                "snapkv(budget=0.1",
            )
        ],
        "at a KL of #, where `snapkv(budget=0.5)` alone has #": [packed, alone],
    }.items():
        (found,) = re.finditer(with_numbers(sentence), one_line(LINEAGE / "README.md"))
        assert list(map(float, found.groups())) == pytest.approx(values, abs=0.00056)


def test_the_needles_that_lineage_counts_are_in_its_report() -> None:
    page = one_line(LINEAGE / "README.md")
    for task, sentence in (
        ("needle with", "half of the prompt keeps {0.5} of 8 needles under SnapKV"),
        ("needle with", "from {0.5} of 8 to {agnostic 0.5} at half of the prompt"),
        ("needle with", "and from {0.25} to {agnostic 0.25} at a quarter"),
    ):
        inside, after = lineage_table(task), lineage_table("needle_agnostic with")

        def count(name: str, inside: dict[str, Any] = inside, after: dict[str, Any] = after) -> str:
            table, budget = (after, name.split()[1]) if " " in name else (inside, name)
            score = table[f"snapkv(budget={budget})"]["string_match_all ± s.e."].split()[0]
            return str(round(float(score) * 8))

        assert re.sub(r"\{(.*?)\}", lambda found: count(found[1]), sentence) in page
