"""Runs that are killed, stopped, refused by the disk or started twice lose no finished record."""

import copy
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from transformers import FalconConfig
from typer.testing import CliRunner

import kvcompress as kvc
from kvcompress.cli import app
from kvcompress.kernels.choose import library
from kvcompress.measure.record import Record
from kvcompress.models import ModelNotFound
from kvcompress.runs.config import ConfigError, RunConfig, StreamingConfig
from kvcompress.runs.records import RecordFile, RecordsError
from kvcompress.runs.runner import run
from kvcompress.runs.streaming import run_streaming
from kvcompress.runs.summary import Row, markdown, rich_table, summarise
from kvcompress.texts import TextNotFound
from tests.breaking import breaking
from tests.tiny import save_tiny, tiny_llama

__all__ = ["breaking"]  # a fixture
METHODS = ["exact", "snapkv(budget=[16, 24], window=8)", "kivi(group_size=8, residual=16)"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def config(tiny: Path, **changes: object) -> RunConfig:
    options = {"model": str(tiny), "methods": METHODS, "prefix": 40, "scored": 6, "samples": 2, "device": "cpu"}
    return RunConfig(**(options | changes))  # type: ignore[arg-type]


def test_a_second_run_measures_nothing_again(tiny: Path, tmp_path: Path) -> None:
    first = run(config(tiny), tmp_path)
    lines = (tmp_path / "records.jsonl").read_text()
    assert [record.status for record in first] == ["ok"] * 8
    assert len(lines.splitlines()) == 8
    again = run(config(tiny), tmp_path)
    assert (tmp_path / "records.jsonl").read_text() == lines
    assert again == first


def test_a_folder_belongs_to_one_config(tiny: Path, tmp_path: Path) -> None:
    """Methods and samples only add to what is there."""
    run(config(tiny, samples=1, methods=["exact"]), tmp_path)
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"another config \(prefix 41 instead of 40, question 'x' instead of None\)"):
        run(config(tiny, samples=1, prefix=41, question="x"), tmp_path)
    assert (tmp_path / "config.yaml").read_text() == before
    assert len(run(config(tiny), tmp_path)) == 8
    assert len(RecordFile(tmp_path).read()) == 8
    streaming = StreamingConfig(protocol="streaming", model=str(tiny), methods=["exact"], tokens=9, device="cpu")
    with pytest.raises(ConfigError, match="protocol 'streaming' instead of 'prefix'"):
        run_streaming(streaming, tmp_path)


def test_a_config_that_measured_nothing_may_be_mended(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs tokens 0 to 1000007"):
        run(config(tiny, prefix=10**6), tmp_path)
    assert run(config(tiny, methods=["exact"], samples=1), tmp_path)[0].status == "ok"


def test_what_a_kill_cut_short_is_measured_again(tiny: Path, tmp_path: Path) -> None:
    whole = run(config(tiny), tmp_path)
    path = tmp_path / "records.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: content.rfind(b"\n", 0, len(content) - 1) + 40])
    seen: list[int] = []
    again = run(config(tiny), tmp_path, lambda text, done, total: seen.append(done))
    assert [record.nll for record in again] == [record.nll for record in whole]
    assert 7 in seen
    assert all(Record.from_json(line) for line in path.read_text().splitlines())


def test_kill_9_keeps_every_finished_record(tiny: Path, tmp_path: Path) -> None:
    settings = tmp_path / "long.yaml"
    settings.write_text(
        f"model: {tiny}\ndevice: cpu\nprefix: 64\nscored: 8\nsamples: 200\n"
        "methods: [exact, 'kivi(group_size=8, residual=16)']\n"
    )
    out = tmp_path / "out"
    command = [sys.executable, "-m", "kvcompress.cli", "run", str(settings), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    records = out / "records.jsonl"
    deadline = time.monotonic() + 120
    while not (records.exists() and records.read_bytes().count(b"\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    lines = records.read_bytes().split(b"\n")
    assert len(lines) >= 4
    assert all(Record.from_json(line.decode()).status == "ok" for line in lines[:-1])
    with RecordFile(out).opened() as file:  # the dead run's lock does not stand in the way
        assert len(file.records) == len(lines) - 1


def test_ctrl_c_says_what_is_kept(tiny: Path, tmp_path: Path) -> None:
    settings = tmp_path / "long.yaml"
    settings.write_text(f"model: {tiny}\ndevice: cpu\nprefix: 64\nscored: 8\nsamples: 200\nmethods: [exact]\n")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "kvcompress.cli", "run", str(settings), "--out", str(out)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What runs in the background of a shell, these tests too perhaps, ignores Ctrl-C; a user's command does not.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    records = out / "records.jsonl"
    deadline = time.monotonic() + 120
    while not (records.exists() and records.read_bytes().count(b"\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "finished records are safe" in complaint
    assert "Traceback" not in complaint
    assert len(records.read_text().splitlines()) >= 2


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with (
        RecordFile(tmp_path).opened(),
        pytest.raises(RecordsError, match="another run is writing here"),
        RecordFile(tmp_path).opened(),
    ):
        pass


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """/dev/full refuses every write, as a full disk does."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    file = RecordFile(tmp_path)
    file.path = Path("/dev/full")
    with pytest.raises(RecordsError, match=r"No space left on device.*0 finished records are safe"):
        file.append(Record("exact", "m", "float32", "cpu", 0, "", 1, 1, "hash"))
    assert not file.records


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordsError, match="choose another --out"), RecordFile(tmp_path / "file" / "out").opened():
        pass


def test_a_text_that_is_too_short(tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("x" * 60)
    with pytest.raises(ConfigError, match=r"has 60 tokens, but sample 2 of 2 needs tokens 47 to 94"):
        run(config(tiny, data=str(text)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:.*the model was trained for")
@pytest.mark.parametrize("protocol", ["prefix", "streaming"])
def test_a_mistake_in_the_text_is_told_before_the_model_is_loaded(tiny: Path, tmp_path: Path, protocol: str) -> None:
    """This folder holds a tokenizer and no weights: whatever needs them would fail first."""
    model = tmp_path / "model"
    shutil.copytree(tiny, model, ignore=shutil.ignore_patterns("*.safetensors"))
    kind, options = (RunConfig, {"samples": 10}) if protocol == "prefix" else (StreamingConfig, {"tokens": 2000})
    options |= {"protocol": protocol, "model": str(model), "methods": ["exact"], "device": "cpu"}
    measure = run if protocol == "prefix" else run_streaming
    (tmp_path / "short.txt").write_text("x" * 1200)
    with pytest.raises(TextNotFound, match=r"nowhere.txt"):
        measure(kind(**options, data=str(tmp_path / "nowhere.txt")), tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has 1200 tokens, but"):
        measure(kind(**options, data=str(tmp_path / "short.txt")), tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(ModelNotFound):
        measure(kind(**options), tmp_path / "out")  # type: ignore[arg-type]


def test_a_sample_longer_than_the_model_was_trained_for_warns_before_the_model_is_loaded(
    tiny: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ModelNotFound):
        run(config(model, prefix=500, scored=12), tmp_path / "in range")
    assert not recwarn.list
    with pytest.raises(ModelNotFound):
        run(config(model, prefix=500, scored=12, question="ab"), tmp_path / "beyond")
    (told,) = [str(each.message) for each in recwarn.list]
    assert "514 tokens (prefix 500 + question 2 + scored 12) are more than the 512 that" in told


def test_a_stream_longer_than_the_model_was_trained_for_warns_if_a_method_leaves_the_range(
    tiny: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model, ignore=shutil.ignore_patterns("*.safetensors"))
    for method, warnings in (("streaming_llm(window=60)", 0), ("kivi(bits=2)", 1)):
        long = StreamingConfig(protocol="streaming", model=str(model), methods=[method], tokens=513, device="cpu")
        with pytest.raises(ModelNotFound):
            run_streaming(long, tmp_path / method)
        assert len([each for each in recwarn.list if "513 tokens (of one segment)" in str(each.message)]) == warnings


MISFITS = {
    "kivi(group_size=12, residual=24)": "the group_size 12 does not divide the model's head dim 16; choose",
    "snapkv(budget=16, window=8) | kivi(group_size=12, residual=24)": "the group_size 12 does not divide",
    "snapkv(budget=16, window=8, positions='cache')": "cannot be moved to other positions: the frequencies of",
    # Two layers of two heads of 16 keys and 16 values in fp32, and the positions of a layer, for each token.
    "streaming_llm(budget='519B', positions='original')": "does not hold one token (520 bytes); give more",
}


@pytest.mark.parametrize("protocol", ["prefix: 40", "protocol: streaming\ntokens: 60"])
def test_methods_that_do_not_fit_are_told_before_the_model_is_loaded(tiny: Path, tmp_path: Path, protocol: str) -> None:
    """All of them at once, by the config's file and key; this folder holds no weights, which would be missed next."""
    model, settings = tmp_path / "model", tmp_path / "misfits.yaml"
    shutil.copytree(tiny, model, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((model / "config.json").read_text())
    content["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (model / "config.json").write_text(json.dumps(content))
    methods = [*MISFITS, "exact", "streaming_llm(budget='520B', positions='original')"]
    settings.write_text(f"model: {model}\ndevice: cpu\n{protocol}\nmethods: {json.dumps(methods)}\n")
    done = command_line("run", str(settings), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    lines = done.stderr.removeprefix("kvcompress: ").splitlines()
    assert len(lines) == len(MISFITS) and not (tmp_path / "out").exists()
    for line, (method, reason) in zip(lines, MISFITS.items(), strict=True):
        assert line.startswith(f"{settings}: methods: {kvc.parse(method)}: ") and reason in line


def test_a_model_that_no_method_can_run_on_is_told_before_it_is_loaded(tiny: Path, tmp_path: Path) -> None:
    model, settings = tmp_path / "model", tmp_path / "falcon.yaml"
    shutil.copytree(tiny, model, ignore=shutil.ignore_patterns("*.safetensors"))
    FalconConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=4).save_pretrained(model)
    settings.write_text(f"model: {model}\ndevice: cpu\nmethods: [exact]\n")
    done = command_line("run", str(settings), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvcompress: {settings}: model: FalconForCausalLM (falcon) never calls")


def test_what_only_the_loaded_model_shows_is_told_before_anything_is_fed(tiny: Path, tmp_path: Path) -> None:
    """Keys that are all zero say nothing of the model's rotary; no configuration tells of them."""
    model = tiny_llama()
    zero = copy.deepcopy(model)
    for layer in zero.model.layers:
        layer.self_attn.k_proj.weight.data.zero_()
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    zero.save_pretrained(folder)
    moving = "snapkv(positions='cache', budget=16, window=8)"
    with pytest.raises(ConfigError, match=r"methods: .*the keys of layer 0 are all zero") as told:
        run(config(folder, methods=["exact", moving]), tmp_path / "out")
    assert str(told.value).startswith(f"methods: {moving}: ")
    assert not RecordFile(tmp_path / "out").read()


def test_a_warning_is_one_line_without_source(tiny: Path, tmp_path: Path) -> None:
    settings = tmp_path / "long.yaml"
    settings.write_text(f"model: {tiny}\ndevice: cpu\nprefix: 520\nscored: 4\nmethods: [exact]\n")
    done = command_line("run", str(settings), "--out", str(tmp_path / "out"))
    assert done.returncode == 0
    told = [line for line in done.stderr.splitlines() if "trained for" in line]
    assert [line.partition(" are more")[0] for line in told] == [
        "kvcompress: warning: 524 tokens (prefix 520 + scored 4)"
    ]
    assert "UserWarning" not in done.stderr and ".py" not in done.stderr


def command_line(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "kvcompress.cli", *arguments], capture_output=True, text=True)


def test_a_failed_method_is_an_exit_code(tiny: Path, tmp_path: Path, breaking: str) -> None:
    for protocol, size in (("prefix", "prefix: 40\nscored: 6"), ("streaming", "tokens: 40")):
        settings = tmp_path / f"{protocol}.yaml"
        settings.write_text(
            f"protocol: {protocol}\nmodel: {tiny}\ndevice: cpu\n{size}\nmethods: ['{breaking}', exact]\n"
        )
        done = CliRunner().invoke(app, ["run", str(settings), "--out", str(tmp_path / protocol)])
        assert done.exit_code == 1, done.output
        assert "this method breaks" in done.output
        assert "exact" in (tmp_path / protocol / "summary.md").read_text()


def test_records_name_what_else_they_depend_on(tiny: Path, tmp_path: Path) -> None:
    (record,) = run(config(tiny, methods=["exact"], samples=1, chunk=16), tmp_path)
    assert record.settings is not None and record.kernels == library("cpu")
    assert {"data": "python-docs", "start": 0, "chunk": 16, "question": None}.items() <= record.settings.items()
    assert Record.from_json((tmp_path / "records.jsonl").read_text()) == record


def test_without_numba_one_warning_and_every_record_says_so(tiny: Path, tmp_path: Path) -> None:
    settings = tmp_path / "s.yaml"
    settings.write_text(
        f"model: {tiny}\ndevice: cpu\nprefix: 40\nscored: 6\nsamples: 2\n"
        "methods: [exact, 'h2o(heavy=8, recent=8)', 'kivi(group_size=8, residual=16)']\n"
    )
    code = "import sys; sys.modules.update(numba=None, llvmlite=None); from kvcompress.cli import main; main()"
    command = [sys.executable, "-c", code, "run", str(settings), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = " ".join((done.stdout + done.stderr).split())
    assert told.count("plain torch does the work, and slower: Numba is not installed; install kvcompress[cpu]") == 1
    records = RecordFile(tmp_path / "out").read().values()
    assert [(record.kernels, record.status) for record in records] == [("torch", "ok")] * 6


def test_a_failed_method_is_a_record_and_is_tried_again(tiny: Path, tmp_path: Path, breaking: str) -> None:
    bad = config(tiny, methods=[breaking, "exact"], samples=1)
    assert [record.status for record in run(bad, tmp_path)] == ["failed", "ok"]
    run(bad, tmp_path)
    lines = [Record.from_json(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [line.status for line in lines] == ["failed", "ok", "failed"]


def test_summary_is_over_all_scored_tokens() -> None:
    def record(sample: int, nll: float, status: str = "ok") -> Record:
        made = Record("kivi | x", "m", "float32", "cpu", sample, "", 1, 1, "h", nll=nll, kl=nll, status=status)
        made.kv_bytes, made.kept_tokens, made.memory_ratio_16bit, made.top1_agreement = 2_000_000, 10, 4.0, 0.5
        made.memory_ratio, made.decode_ratios = 8.0, [1.0 + sample, 2.0, 3.0]
        made.evicted, made.packed = True, sample == 0
        return made

    row = summarise([record(0, 1.0), record(1, 2.0), record(2, 99.0, "failed")])[0]
    assert row.ppl == pytest.approx(4.4816890703)  # exp(1.5)
    assert row.kl == 1.5
    assert row.decode == (2.0, 2.0, 2.75)  # of 1, 2, 2, 2, 3, 3
    assert row.cells() == [
        *["kivi | x", "8.00", "4.00", "not packed", "2.00", "10", "4.482", "1.5000", "0.500"],
        *["2.00 (2.00–2.75)", "2 (1 failed)"],
    ]
    assert r"`kivi \| x`" in markdown([row], "t")


def test_nothing_is_cut_off_at_80_columns() -> None:
    """Of a table with wide numbers and failed samples, as a real model gives them."""
    wide = Row("snapkv(budget=0.5) | kivi(bits=4)", 12, 3, 7.42, 3.71, "yes", 1234.56, 1024, 10.762, 0.0136, 0.941)
    wide.decode = 1.08, 1.15, 1.20
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rich_table([wide], "t"))
    shown = console.export_text().splitlines()
    heads = next(line for line in shown if "KV MB" in line)
    assert heads.split()[-2:] == ["decode", "n"]
    assert any(line.endswith("12") for line in map(str.rstrip, shown)) and any("(3 failed)" in line for line in shown)
    assert max(map(len, shown)) <= 80 and "…" not in "".join(shown)
    assert "taken in turns: median (quartiles)" in " ".join(" ".join(shown).split())


def test_a_method_that_changes_nothing_is_marked(tiny: Path, tmp_path: Path) -> None:
    """Of a prompt of 40 tokens; the last of kivi's tokens, the 40th and later, are packed while scoring."""
    methods = {
        "exact": "–",
        "streaming_llm(sinks=2, window=5000)": "no",
        "kivi(group_size=8, residual=64)": "no",
        "kivi(group_size=8, residual=16)": "yes",
        "snapkv(budget=0.5, window=8)": "yes",
        "snapkv(budget=0.5, window=8) | kivi(group_size=8, residual=32)": "not packed",
        "snapkv(budget=0.99, window=8) | kivi(group_size=8, residual=8)": "yes",
        "snapkv(budget=100, window=8) | kivi(group_size=8, residual=8)": "not evicted",
    }
    rows = summarise(run(config(tiny, methods=[*methods], samples=1), tmp_path))
    assert [row.compressed for row in rows] == [*methods.values()]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rich_table(rows, "t"))
    shown = console.export_text()
    assert shown.count("compressed: no") == 4 and max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


def test_no_nan_in_json() -> None:
    line = Record("exact", "m", "float32", "cpu", 0, "", 1, 1, "h", kl=float("nan"), ppl=float("inf")).to_json()
    assert "NaN" not in line
    assert "Infinity" not in line
    assert Record.from_json(line).kl is None
