"""What an experiment is: YAML, read strictly."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvcompress.methods.base import Method
from kvcompress.text_form import MethodError, nearest, parse


class ConfigError(ValueError):
    """A config file cannot be read or says something wrong."""


class RunConfig(BaseModel):
    """One experiment: every method on the same samples of a text.

    `data` is `python-docs` or a text file. Sample i is tokens `start + i * stride` and on; `stride` is by default
    what one sample needs. A list in a method's option is a grid: `snapkv(budget=[0.1, 0.25])` is two methods.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    methods: list[str | dict[str, dict[str, Any] | None]] = Field(min_length=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    data: str = "python-docs"
    start: Annotated[int, Field(ge=0)] = 0
    prefix: Annotated[int, Field(ge=1)] = 1024
    scored: Annotated[int, Field(ge=1)] = 128
    samples: Annotated[int, Field(ge=1)] = 1
    stride: Annotated[int, Field(ge=1)] | None = None
    question: str | None = None
    chunk: Annotated[int, Field(ge=1)] | None = None
    share_prefill: bool = True
    seed: int = 0
    trust_remote_code: bool = False

    @field_validator("methods")
    @classmethod
    def _known(cls, value: list[Any]) -> list[Any]:
        for entry in value:
            expand(entry)
        return value

    def grid(self) -> list[Method]:
        """All methods, each once, in the order in which they were written."""
        return list(dict.fromkeys(method for entry in self.methods for method in expand(entry)))


def expand(entry: str | dict[str, dict[str, Any] | None]) -> list[Method]:
    """The methods that one entry of `methods` stands for: a text or `{name: {option: value or list}}`."""
    if isinstance(entry, dict):
        if len(entry) != 1:
            raise MethodError(f"a method given as a mapping has one name and its options, got {sorted(entry)}")
        ((name, options),) = entry.items()
        entry = f"{name}({', '.join(f'{option}={value!r}' for option, value in (options or {}).items())})"
    try:
        tree = ast.parse(entry.strip(), mode="eval")
    except SyntaxError:
        return [parse(entry)]
    words = [node for node in ast.walk(tree) if isinstance(node, ast.keyword) and isinstance(node.value, ast.List)]
    choices = [word.value.elts for word in words if isinstance(word.value, ast.List)]
    methods = []
    for combination in itertools.product(*choices):
        for word, value in zip(words, combination, strict=True):
            word.value = value
        methods.append(parse(ast.unparse(tree)))
    if not methods:
        raise MethodError(f"{entry!r}: an empty list leaves no method")
    return methods


def read_config(path: Path) -> RunConfig:
    """The config in a YAML file. Raises ConfigError naming the file, the key and the nearest valid one."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys such as model and methods, got {type(content).__name__}")
    try:
        return RunConfig(**content)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {_explain(each)}" for each in error.errors())) from None
    except TypeError:
        raise ConfigError(
            f"{path}: every key must be a text, got {[key for key in content if not isinstance(key, str)]}"
        ) from None


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}{nearest(key, list(RunConfig.model_fields))}"
    if error["type"] == "missing":
        return f"the key {key!r} is missing"
    message = error["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" + ("" if error["type"] == "value_error" else f", got {error['input']!r}")
