"""What an experiment is: YAML, read strictly."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from kvcompress.budget import parse_bytes
from kvcompress.measure.streaming import bucket_ends
from kvcompress.methods.base import Method
from kvcompress.text_form import MethodError, nearest, parse


class ConfigError(ValueError):
    """A config file cannot be read or says something wrong."""


AtLeastOne = Annotated[int, Field(ge=1)]


def _a_size(value: str | None) -> str | None:
    if value is not None:
        parse_bytes(value)
    return value


class Experiment(BaseModel):
    """What every protocol has. A list in a method's option is a grid: `snapkv(budget=[0.1, 0.25])` is two methods.

    `data` is `python-docs` or a text file; tokens before `start` are passed over.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    methods: list[str | dict[str, dict[str, Any] | None]] = Field(min_length=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    data: str = "python-docs"
    start: Annotated[int, Field(ge=0)] = 0
    stride: AtLeastOne | None = None
    seed: int = 0
    trust_remote_code: bool = False

    @field_validator("methods")
    @classmethod
    def _known(cls, value: list[Any]) -> list[Any]:
        for entry in value:
            expand(entry)
        return value

    @field_validator("methods", mode="before")
    @classmethod
    def _texts_or_mappings(cls, value: Any) -> Any:
        if not isinstance(value, list):
            raise ValueError(f"expected a list of methods such as [exact, 'snapkv(budget=0.25)'], got {value!r}")
        for entry in value:
            options = [entry] if isinstance(entry, str) else [*entry.values()] if isinstance(entry, dict) else [0]
            if not all(each is None or isinstance(each, str | dict) for each in options):
                raise ValueError(
                    "a method is a text such as 'snapkv(budget=0.25)' or a mapping such as {snapkv: {budget: 0.25}}, "
                    f"got {entry!r}"
                )
        return value

    def grid(self) -> list[Method]:
        """All methods, each once, in the order in which they were written."""
        return list(dict.fromkeys(method for entry in self.methods for method in expand(entry)))


class RunConfig(Experiment):
    """A prefix is prefilled and compressed, what follows is scored: every method on the same samples of a text.

    Sample i is tokens `start + i * stride` and on; `stride` is by default what one sample needs. A `prefix_cache` of
    so many bytes ("1GiB") keeps exact KV, so that methods that prefill by themselves compute a common beginning once.
    """

    protocol: Literal["prefix"] = "prefix"
    prefix: AtLeastOne = 1024
    scored: AtLeastOne = 128
    samples: AtLeastOne = 1
    question: str | None = None
    chunk: AtLeastOne | None = None
    share_prefill: bool = True
    prefix_cache: str | None = None

    @field_validator("question")
    @classmethod
    def _something_asked(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("the question is empty, so that nothing would be asked; leave it out or write one")
        return value

    _a_size = field_validator("prefix_cache")(_a_size)


class Recompute(BaseModel):
    """Sliding-window recomputation beside the methods: the last `window` tokens are encoded anew, `every` tokens."""

    model_config = ConfigDict(extra="forbid")

    window: AtLeastOne
    every: AtLeastOne = 64

    def __str__(self) -> str:
        return f"recompute(window={self.window}, every={self.every})"


class StreamingConfig(Experiment):
    """`tokens` tokens are fed as decoding behind a prompt of `prefix` tokens; a record tells of each `bucket` of them.

    `segments` parts of the text, by default one after the other, are the rows of one batch. `bucket` is a number of
    tokens, or "doubling" for 64, 128, 256, … With `tokens_per_call` above 1, a method that acts on every call evicts
    once a call. A method whose stored KV exceeds `memory_limit` (such as "512MiB") is fed no further.
    """

    protocol: Literal["streaming"]
    tokens: Annotated[int, Field(ge=2)]
    prefix: AtLeastOne = 1
    segments: AtLeastOne = 1
    bucket: AtLeastOne | Literal["doubling"] = 1024
    tokens_per_call: AtLeastOne = 1
    memory_limit: str | None = None
    recompute: Recompute | None = None

    _a_size = field_validator("memory_limit")(_a_size)

    @model_validator(mode="after")
    def _something_to_feed(self) -> StreamingConfig:
        if self.prefix >= self.tokens:
            raise ValueError(f"prefix {self.prefix} leaves nothing of {self.tokens} tokens; lower it or raise tokens")
        return self

    def ends(self) -> list[int]:
        """How many tokens are fed when each bucket ends."""
        return bucket_ends(self.tokens, self.bucket, self.prefix)


AnyConfig = Annotated[RunConfig | StreamingConfig, Field(discriminator="protocol")]


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


def read_config(path: Path) -> RunConfig | StreamingConfig:
    """The config in a YAML file, of protocol "prefix" unless it names another.

    Raises ConfigError naming the file, the key and the nearest valid one.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys such as model and methods, got {type(content).__name__}")
    try:
        return TypeAdapter(AnyConfig).validate_python({"protocol": "prefix"} | content)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {_explain(each)}" for each in error.errors())) from None


PROTOCOLS: dict[str, type[Experiment]] = {"prefix": RunConfig, "streaming": StreamingConfig}


def _explain(error: Any) -> str:
    if error["type"] == "union_tag_invalid":
        return f"unknown protocol {error['ctx']['tag']!r}{nearest(str(error['ctx']['tag']), list(PROTOCOLS))}"
    protocol, *place = error["loc"]
    key = ".".join(str(part) for part in place)
    if error["type"] == "invalid_key":
        return f"every key must be a text, got {key}"
    if error["type"] == "extra_forbidden":
        known = Recompute if len(place) > 1 else PROTOCOLS[protocol]
        return f"unknown key {key!r}{nearest(str(place[-1]), list(known.model_fields))}"
    if error["type"] == "missing":
        return f"the key {key!r} is missing"
    message = error["msg"].removeprefix("Value error, ")
    return (
        (f"{key}: " if key else "") + message + ("" if error["type"] == "value_error" else f", got {error['input']!r}")
    )
