"""The report as Chromium lays it out: in print numbers stay whole, and on a wide screen no table is cut off."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvcompress.measure.record import Record
from kvcompress.runs.report.reading import Results
from kvcompress.runs.report.writing import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
METHODS = ("streaming_llm(positions='original', window=252)", "snapkv(budget=0.5, window=16) | kivi(bits=4)")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A report whose numbers are as wide as those of a real model."""
    results = Results([tmp_path])
    for method in METHODS:
        for sample in range(8):
            made = Record(method, "m", "float32", "cpu", sample, "", 1024, 128, method, nll=6.5, ppl=665.14, kl=1.3044)
            made.nll_exact, made.kv_bytes, made.kv_bytes_exact, made.kept_tokens = (
                6.0,
                1_234_560_000,
                4_567_890_000,
                1024,
            )
            made.memory_ratio, made.memory_ratio_16bit, made.top1_agreement = 3.70, 1.85, 0.898
            made.decode_ratios, made.evicted, made.packed = [1.21, 1.35, 1.46], True, True
            made.decode_ms_per_token = made.decode_ms_per_token_exact = 123.0
            results.records.append(made)
    return write_report(results, tmp_path / "out")[0]


def chromium(tmp_path: Path, *arguments: str) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="pdftotext (poppler-utils) is not installed")
def test_in_print_numbers_are_not_broken(page: Path, tmp_path: Path) -> None:
    pdf = tmp_path / "page.pdf"
    chromium(tmp_path, f"--print-to-pdf={pdf}", page.as_uri())
    text = subprocess.run(["pdftotext", "-layout", str(pdf), "-"], capture_output=True, text=True, check=True).stdout
    for number in ("665.142", "1234.56", "1.3044", "0.898", "3.70", "1.85", "123"):
        assert len(re.findall(rf"(?<![\d.]){re.escape(number)}(?![\d.])", text)) >= len(METHODS), text


def test_on_a_wide_screen_no_table_is_cut_off(page: Path, tmp_path: Path) -> None:
    """A script behind the page writes down which tables are wider than their place."""
    measure = (
        "<script>document.body.dataset.cut = [...document.querySelectorAll('.scroll')]"
        ".map((each) => Math.max(0, each.scrollWidth - each.clientWidth)).join(' ')</script>"
    )
    page.write_text(page.read_text().replace("</body>", f"{measure}</body>"))
    shown = chromium(tmp_path, "--window-size=1280,900", "--dump-dom", page.as_uri())
    found = re.search(r'data-cut="([\d ]+)"', shown)
    assert found is not None and set(found[1].split()) == {"0"}
