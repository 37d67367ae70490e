"""A run with a prefix cache against the same run without one."""

from pathlib import Path

import pytest

from kvcompress.runs.config import ConfigError, RunConfig, read_config
from kvcompress.runs.runner import run
from tests.tiny import save_tiny

METHODS = ["snapkv(budget=32, window=8)", "kivi(group_size=8, residual=16)"]


def test_methods_that_prefill_by_themselves_compute_the_prefix_once(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    options = {"model": str(model), "methods": METHODS, "prefix": 90, "scored": 4, "samples": 1, "device": "cpu"}
    plain = run(RunConfig.model_validate(options | {"share_prefill": False}), tmp_path / "plain")
    reused = run(
        RunConfig.model_validate(options | {"share_prefill": False, "prefix_cache": "1MiB"}), tmp_path / "reused"
    )
    for record, expected in zip(reused, plain, strict=True):
        assert (record.method, record.status, record.kv_bytes) == (expected.method, "ok", expected.kv_bytes)
        assert record.nll == pytest.approx(expected.nll, abs=1e-5)
        # The exact prefix of the sample has filled the cache; of 90 tokens, snapkv's window of 8 is computed again.
        assert (expected.tokens_reused, record.tokens_reused) == (0, 80)
        assert record.config_hash != expected.config_hash


def test_a_wrong_size_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: tiny\nmethods: [exact]\nprefix_cache: much\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: prefix_cache: .*'much' is not a size in bytes"):
        read_config(path)
