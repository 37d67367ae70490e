"""README's code blocks: the first snippet run as it stands, the commands as they stand or on a tiny model."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from kvcompress.cli import app
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[1]


def blocks(language: str) -> list[str]:
    """All code blocks of README in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def commands(start: str) -> list[list[str]]:
    """The lines of README's shell blocks that begin with this word, as a shell splits them, comments left out."""
    lines = (shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines())
    return [line[1:] for line in lines if line[:1] == [start]]


@pytest.mark.model
def test_the_first_snippet_finds_what_the_text_hides() -> None:
    snippet = blocks("python")[0]
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    answer, kept, smaller = done.stdout.splitlines()[0], *done.stdout.splitlines()[-2:]
    assert answer.strip().startswith("granite")
    stays, fed = map(int, re.findall(r"\d+", kept))
    # A quarter of the prompt, and the tokens that were generated and fed since: all but the last one.
    assert stays == (fed - 2) // 4 + 2
    assert float(smaller.split()[0]) > 8


def test_every_command_is_one_that_the_program_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed, not run: `eval` and `bench` take minutes; tests/evals and tests/measure run them small."""
    monkeypatch.chdir(ROOT)
    program = get_command(app)
    found = commands("kvcompress")
    assert {line[0] for line in found} >= {"run", "eval", "report", "bench", "size"}
    for line in found:
        with program.make_context("kvcompress", list(line)) as context:
            name, command, rest = program.resolve_command(context, list(line))  # type: ignore[attr-defined]
            command.make_context(name, rest, parent=context)


def test_make_has_what_it_is_asked_for() -> None:
    for line in commands("make"):
        done = subprocess.run(["make", "--dry-run", *line], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr


def test_the_experiment_its_report_and_a_size_on_a_tiny_model(tmp_path: Path) -> None:
    model = str(save_tiny(tmp_path / "tiny"))
    ((command, config),) = [line for line in commands("kvcompress") if line[0] == "run"]
    small = {"model": model, "prefix": 300, "scored": 4, "device": "cpu"}
    shrunk = tmp_path / "quickstart.yaml"
    shrunk.write_text(yaml.safe_dump(yaml.safe_load((ROOT / config).read_text()) | small))
    out = str(tmp_path / "out")
    (report,) = [line for line in commands("kvcompress") if line[0] == "report"]
    (size,) = [line for line in commands("kvcompress") if line[0] == "size"]
    for arguments in ([command, str(shrunk), "--out", out], [report[0], out], [size[0], model, *size[2:]]):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
    assert {path.name for path in Path(out).glob("report.*")} >= {"report.html", "report.md"}


def test_the_table_of_the_replay_is_what_the_command_prints() -> None:
    ((command, trace),) = [line for line in commands("kvcompress") + inline_commands() if line[0] == "replay"]
    done = CliRunner().invoke(app, [command, str(ROOT / trace), "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, list[tuple[int | None, int]]] = {}
    for each in json.loads(done.output)["policies"]:
        found.setdefault(each["policy"], []).append((each["cap"], each["recomputed"]))
    text = (ROOT / "README.md").read_text()
    assert f"| recomputed of {found['none'][0][1]:,} tokens |" in text
    for policy, counts in found.items():
        caps = " / ".join(str(cap) for cap, _ in counts if cap is not None)
        recomputed = " / ".join(f"{count:,}" for _, count in counts)
        assert f"| {policy} | {caps} | {recomputed} |".replace("|  |", "| |") in text


def inline_commands() -> list[list[str]]:
    """Commands within README's sentences, without options."""
    found = re.findall(r"`kvcompress (\w+ [\w./-]+)`", (ROOT / "README.md").read_text())
    return [shlex.split(each) for each in found]
