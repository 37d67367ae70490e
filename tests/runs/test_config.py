"""Configs are read strictly, and a list in an option is a grid."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvcompress as kvc
from kvcompress.cli import app
from kvcompress.runs.config import ConfigError, RunConfig, expand, read_config


def texts(entry: object) -> list[str]:
    return [str(method) for method in expand(entry)]  # type: ignore[arg-type]


def test_a_list_is_a_grid() -> None:
    assert texts("snapkv(budget=[0.1, 0.25], window=[16, 32]) | kivi(bits=[2, 4])") == [
        str(kvc.SnapKV(budget=budget, window=window) | kvc.KIVI(bits=bits))
        for budget in (0.1, 0.25)
        for window in (16, 32)
        for bits in (2, 4)
    ]


def test_a_mapping_says_the_same() -> None:
    heavy = ["h2o(heavy=64, recent=64)", "h2o(heavy=0.1, recent=64)"]
    assert texts({"h2o": {"heavy": [64, 0.1], "recent": 64}}) == heavy
    assert texts({"exact": None}) == ["exact"]


def test_a_method_that_occurs_twice_is_run_once() -> None:
    config = RunConfig(model="m", methods=["kivi(bits=[2, 4])", "kivi"])
    assert [str(method) for method in config.grid()] == ["kivi(bits=2)", "kivi(bits=4)"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("model: m\nmethods: [exact]\nprefx: 3\n", "unknown key 'prefx'; did you mean 'prefix'?"),
        ("model: m\nmethods: [snapk]\n", "unknown method 'snapk'; did you mean 'snapkv'?"),
        ("model: m\nmethods:\n- snapkv(budgt=3)\n", "no option 'budgt'; did you mean 'budget'?"),
        ("model: m\nmethods:\n- snapkv(budget=8)\n", "budget 8 tokens is less than the observation window (32)"),
        ("model: m\nmethods:\n- snapkv(budget=[])\n", "an empty list leaves no method"),
        ("methods: [exact]\n", "the key 'model' is missing"),
        ("model: m\nmethods: [exact]\nprefix: 0\n", "prefix: Input should be greater than or equal to 1, got 0"),
        ("model: m\nmethods: [exact]\nprefix: many\n", "got 'many'"),
        ("model: m\nmethods: exact\n", "methods: expected a list of methods such as [exact, "),
        ("model: m\nmethods: [exact, 3]\n", "methods: a method is a text such as 'snapkv(budget=0.25)' or a mapping"),
        ("model: m\nmethods: [{kivi: 2}]\n", "or a mapping such as {snapkv: {budget: 0.25}}, got {'kivi': 2}"),
        ("model: m\nmethods: [exact]\nquestion: ''\n", "question: the question is empty"),
        ("- model\n", "expected keys such as model and methods, got list"),
        ("model: [", "not valid YAML"),
    ],
)
def test_mistakes_name_the_file_and_the_fix(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "mistake.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert str(path) in str(error.value)
    assert expected in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_every_config_in_the_repository_is_valid() -> None:
    root = Path(__file__).parents[2]
    paths = [*(root / "configs").glob("*.yaml"), *root.glob("experiments/*/config*.yaml")]
    assert root / "configs/quickstart.yaml" in paths
    for path in paths:
        assert read_config(path).grid()


def test_methods_command_lists_all() -> None:
    shown = CliRunner().invoke(app, ["methods"]).output
    assert all(name in shown for name in kvc.methods())
