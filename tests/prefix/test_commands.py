"""The commands `replay` and `size` as a user runs them."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from kvcompress.prefix.commands import replay, size

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "radix_lab.json").read_text())
SIZES = json.loads((ROOT / "tests" / "golden" / "sizes.json").read_text())
DAY = str(ROOT / "configs" / "traces" / "coding_day.yaml")
PRICES = str(ROOT / "configs" / "prices" / "anthropic-2026-07.yaml")

app = typer.Typer()
app.command()(replay)
app.command()(size)


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result


def test_replay_prints_the_worked_table() -> None:
    lines = [line for line in run("replay", DAY).stdout.splitlines() if line.startswith("│")]
    rows = [tuple(cell.strip() for cell in line.strip("│").split("│"))[:3] for line in lines]
    expected = [
        ("none", "", GOLDEN["none"]),
        ("per-stream", "", GOLDEN["per_stream"]),
        ("global", "", GOLDEN["global"]),
    ]
    expected += [("LRU", cap, tokens) for cap, tokens in GOLDEN["global_lru"].items()]
    expected += [("leaf-LRU", cap, tokens) for cap, tokens in GOLDEN["global_leaf_lru"].items()]
    assert rows == [(policy, cap, f"{tokens:,}") for policy, cap, tokens in expected]


def test_replay_says_in_one_line_what_orphans_cost() -> None:
    """At a cap of 90, LRU loses 75,600 - 35,816 tokens against leaf-LRU."""
    (line,) = [line for line in run("replay", DAY, "--cap", "90").stdout.splitlines() if "orphaned children" in line]
    assert line.startswith("at 90 blocks LRU recomputes 39,784 tokens more than leaf-LRU")
    assert "298 orphaned children" in line and "(34,468 tokens)" in line


def test_replay_as_json(tmp_path: Path) -> None:
    options = ("--json", "--cap", "60", "--cap", "90", "--prices", PRICES, "--png", str(tmp_path / "curve.png"))
    report = json.loads(run("replay", DAY, *options).stdout)
    counts = {(each["policy"], each["cap"]): each for each in report["policies"]}
    assert counts["LRU", 90]["recomputed"] == GOLDEN["global_lru"]["90"]
    assert counts["leaf-LRU", 60]["hit_rate"] == pytest.approx(1 - GOLDEN["global_leaf_lru"]["60"] / GOLDEN["total"])
    assert report["tokens"] == GOLDEN["total"] and report["requests"] == 30 and report["block"] == 128
    assert report["tree"]["children"][0]["tokens"] == 4100
    cost = report["cost"]
    assert cost["read"] + sum(cost["written"].values()) + cost["plain"] == cost["cost_uncached"] == GOLDEN["total"]
    assert cost["cost"] == pytest.approx(0.1 * cost["read"] + 1.25 * cost["written"]["5m"] + cost["plain"])


def test_the_figure_shows_hit_rate_against_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines drawn hold the worked hit rates; the file is a PNG of the size asked for."""
    from matplotlib.axes import Axes

    drawn = {}
    step = Axes.step

    def record(self, x, y, **options):
        drawn[options["label"]] = dict(zip(x.tolist(), y.tolist(), strict=True))
        return step(self, x, y, **options)

    monkeypatch.setattr(Axes, "step", record)
    run("replay", DAY, "--png", str(tmp_path / "curve.png"))
    for label, key in (("LRU", "global_lru"), ("leaf-LRU", "global_leaf_lru")):
        for cap, tokens in GOLDEN[key].items():
            assert drawn[label][int(cap)] == pytest.approx(100 * (1 - tokens / GOLDEN["total"]))
    assert (tmp_path / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.filterwarnings("error")
def test_prompts_too_short_for_a_block_are_all_recomputed(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text("[1, 2]\n[1, 2]\n")
    report = json.loads(run("replay", str(path), "--json", "--prices", PRICES, "--png", str(tmp_path / "x.png")).stdout)
    assert {each["recomputed"] for each in report["policies"]} == {4}
    assert report["distinct_blocks"] == 0 and report["cost"]["cost"] == 4


def test_a_bad_line_stops_or_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"tokens": [1, 2]}\n{"tokens": [-1]}\n{"tokens": [1, 2]}\n')
    stopped = run("replay", str(path), "--block", "1", code=2)
    assert f"{path}:2: tokens[0]" in stopped.stderr and "Traceback" not in stopped.output
    skipped = run("replay", str(path), "--block", "1", "--on-error", "skip", "--json")
    assert f"left out: {path}:2: tokens[0]" in skipped.stderr
    assert [each["recomputed"] for each in json.loads(skipped.stdout)["policies"][:2]] == [4, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.yaml",), "none.yaml: no such file"),
        ((DAY, "--cap", "-1"), "cap=-1"),
        ((DAY, "--reserve", "-1"), "reserve=-1"),
        ((DAY, "--prices", "none.yaml"), "none.yaml: No such file"),
        ((DAY, "--prices", PRICES, "--model", "opus-4.9"), "did you mean 'opus-4.8'?"),
        ((DAY, "--prices", PRICES, "--breakpoint", "claude.md"), "did you mean 'CLAUDE.md'?"),
        ((DAY, "--png", "/nowhere/x.png"), "/nowhere/x.png"),
    ],
)
def test_a_mistake_in_replay_is_one_message_and_code_2(arguments: tuple, message: str) -> None:
    result = run("replay", *arguments, code=2)
    assert message in result.stderr and result.stderr.startswith("kvcompress: ")
    assert len(result.stderr.splitlines()) == 1


def folder_of(tmp_path: Path) -> str:
    worked = SIZES["8b_gqa_fp16"]
    config = {
        "model_type": "llama",
        "num_hidden_layers": worked["layers"],
        "num_attention_heads": 32,
        "num_key_value_heads": worked["kv_heads"],
        "head_dim": worked["head_dim"],
        "max_position_embeddings": 8192,
        "dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_size_of_a_folder(tmp_path: Path) -> None:
    facts = json.loads(run("size", folder_of(tmp_path), "--context", "4096", "--batch", "3", "--json").stdout)
    each = SIZES["8b_gqa_fp16"]["per_token"]
    assert facts["bytes_per_token"] == each and facts["dtype"] == "float16" and facts["attention"] == "GQA"
    assert facts["bytes"] == 3 * 4096 * each
    assert facts["tokens_within_budget"] == 80 * 2**30 // (3 * each)
    assert facts["users_within_budget"] == 80 * 2**30 // (4096 * each)


def test_size_as_a_table(tmp_path: Path) -> None:
    lines = run("size", folder_of(tmp_path), "--budget", "16GiB", "--dtype", "float32").stdout
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines.splitlines()]
    cells = {row[0]: row[1] for row in rows if len(row) == 2}
    assert cells["bytes per token"] == "262,144"
    assert cells["1 × 8,192 tokens, exact"] == "2,147,483,648 (2 GiB)"
    assert cells["tokens that fit into 16 GiB"] == "65,536"
    assert cells["users of 8,192 tokens that fit"] == "8"


def test_a_mistake_in_size_is_one_message_and_code_2(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for option, value, message in [
        ("--budget", "80GiBs", "'80GiBs'"),
        ("--context", "0", "context 0"),
        ("--batch", "0", "batch=0"),
        ("--dtype", "int8", "dtype 'int8'"),
        ("--method", "h3o()", "h3o"),
    ]:
        result = run("size", folder, option, value, code=2)
        assert message in result.stderr and result.stderr.startswith("kvcompress: ")
    assert "no/such/model" in run("size", "no/such/model", code=2).stderr
