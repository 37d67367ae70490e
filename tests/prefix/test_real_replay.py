"""Real replays against the simulated counts, and against every prompt computed whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from kvcompress.prefix.commands import replay as replay_command
from kvcompress.prefix.policies import LeastRecentlyUsed, Unlimited, replay
from kvcompress.prefix.real_replay import real_replay
from kvcompress.prefix.requests import Trace
from kvcompress.prefix.trace import read_trace

CODING_DAY = Path(__file__).parents[2] / "configs/traces/coding_day.yaml"
BYTES_PER_TOKEN = 2 * 1 * 2 * 16 * 4  # keys and values of 2 layers, 1 KV head, 16 dims, fp32


@pytest.fixture(scope="module")
def short_day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The coding day with every segment a sixteenth as long, in blocks of 64 tokens."""
    day = yaml.safe_load(CODING_DAY.read_text())
    day["block"] = 64
    day["segments"] = {label: tokens // 16 for label, tokens in day["segments"].items()}
    path = tmp_path_factory.mktemp("traces") / "short_day.yaml"
    path.write_text(yaml.safe_dump(day))
    return path


def test_the_counts_are_the_simulations_and_the_logits_those_of_computing_all(short_day: Path) -> None:
    trace, contiguous = read_trace(short_day), read_trace(short_day, cut="contiguous")
    caps = [8, 14, None]
    report = real_replay(trace, caps)
    for outcome, cap in zip(report.outcomes, caps, strict=True):
        policy = Unlimited() if cap is None else LeastRecentlyUsed(cap, leaf_first=True)
        expected = replay(contiguous, policy, reserve=1).recomputed
        assert outcome.recomputed == outcome.simulated == expected
        assert outcome.tokens == contiguous.tokens
        assert outcome.difference == 0 and outcome.largest_logit > 1
        blocks = len(contiguous.blocks) if cap is None else min(cap, len(contiguous.blocks))
        assert outcome.bytes_held == blocks * trace.block * BYTES_PER_TOKEN


def test_a_trace_of_token_ids_is_replayed_with_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    shared = list(range(300, 340))
    prompts = [[*shared, 1, 2, 3], shared + [4] * 20, shared[:31], shared + [4] * 21]
    path.write_text("".join(f'{{"tokens": {prompt}}}\n' for prompt in prompts))
    trace: Trace = read_trace(path, keep_tokens=True)
    unlimited, nothing = real_replay(trace, [None, 0]).outcomes
    # Blocks of 16: the first stores 2 of them, the second reuses both, the third one, the last 3 (48 of 61 tokens).
    assert unlimited.recomputed == 43 + (60 - 32) + (31 - 16) + (61 - 48) == unlimited.simulated
    assert (nothing.recomputed, nothing.bytes_held) == (43 + 60 + 31 + 61, 0)
    assert unlimited.difference == nothing.difference == 0


def test_the_command_prints_both_counts(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9]}\n' * 3)
    app = typer.Typer()
    app.command()(replay_command)
    options = [str(path), "--block", "4", "--cap", "1", "--real"]
    (capped, unlimited) = json.loads(CliRunner().invoke(app, [*options, "--json"]).stdout)["real"]["outcomes"]
    assert (capped["recomputed"], unlimited["recomputed"]) == (9 + 5 + 5, 9 + 1 + 1)
    assert (capped["bytes_held"], unlimited["bytes_held"]) == (4 * BYTES_PER_TOKEN, 8 * BYTES_PER_TOKEN)
    printed = CliRunner().invoke(app, options).stdout
    for row in (["1", "19", "19", "1,024", "0"], ["unlimited", "11", "11", "2,048", "0"]):
        assert any([cell.strip() for cell in line.strip("│").split("│")] == row for line in printed.splitlines()), row
