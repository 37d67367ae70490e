"""Models by name: a built-in one, a folder, or a Hub id."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from kvcompress.built_in import (
    BUILT_INS,
    BuiltIn,
    FetchFailed,
    ModelNotFound,
    cache_folder,
    fetch,
    is_complete,
    refuse,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "BUILT_INS",
    "BuiltIn",
    "FetchFailed",
    "ModelNotFound",
    "fetch",
    "load_config",
    "load_model",
    "load_tokenizer",
    "without_weights",
]

DTYPES = ("float32", "bfloat16", "float16", "float64")


def load_config(name_or_path: str | Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a built-in model, a folder or a Hub id.

    Raises:
        ModelNotFound: nothing answers to that name.
    """
    from transformers import AutoConfig

    return _from_pretrained(AutoConfig, name_or_path, trust_remote_code=trust_remote_code)


def without_weights(config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal language model of a configuration with its buffers, but parameters on the meta device: no weights.

    Raises:
        ValueError: transformers knows no causal language model of that configuration.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def load_tokenizer(name_or_path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The fast tokenizer of a model, padding on the left, as decoding needs it.

    Without a padding token the end of sequence serves as one; a missing BOS token is left missing.

    Raises:
        ModelNotFound: nothing answers to that name.
    """
    from transformers import AutoTokenizer

    tokenizer = _from_pretrained(AutoTokenizer, name_or_path, trust_remote_code=trust_remote_code)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    name_or_path: str | Path,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model in evaluation mode, from safetensors only (pickled weights could run code).

    `device=None` takes a CUDA device where there is one; `"auto"` lets accelerate spread the layers.

    Raises:
        ModelNotFound: nothing answers to that name, or it holds no sound safetensors weights.
        ValueError: an unknown `dtype`, a device that is not there, or weights missing from the checkpoint.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device != "auto":
        device = _device(device)
    model, loaded = _from_pretrained(
        AutoModelForCausalLM,
        name_or_path,
        dtype=_dtype(dtype),
        device_map="auto" if device == "auto" else None,
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
    )
    if missing := sorted(loaded["missing_keys"]):
        raise ValueError(
            f"model {str(name_or_path)!r} lacks {len(missing)} weights, among them {missing[0]!r}, which would be "
            "random: expected the checkpoint of a causal language model"
        )
    return (model if device == "auto" else model.to(device)).eval()


def _from_pretrained(loader: Any, name_or_path: str | Path, **options: Any) -> Any:
    name = str(name_or_path)
    path = Path(name_or_path).expanduser()
    if name in BUILT_INS and not path.is_dir():
        path = cache_folder() / name
        if not is_complete(path):
            raise ModelNotFound(f"the built-in model {name!r} is not here yet: run `kvcompress fetch {name}` once")
    elif not path.is_dir() and "/" not in name and difflib.get_close_matches(name, BUILT_INS, cutoff=0.8):
        refuse(name, "there is no such folder")
    try:
        return loader.from_pretrained(path if path.is_dir() else name, **options)
    except OSError as error:
        kind = "this folder cannot be loaded" if path.is_dir() else "there is no such folder, and the Hub gave nothing"
        refuse(name, f"{kind} ({str(error).strip().splitlines()[0]})", error)
    except SafetensorError as error:
        refuse(name, f"its weights are damaged ({error})", error)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    import torch

    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        near = difflib.get_close_matches(name, DTYPES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"dtype {name!r}: expected one of {', '.join(DTYPES)}{hint}")
    return getattr(torch, name)


def _device(device: str | torch.device) -> torch.device:
    import torch

    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r}: expected 'cpu', 'cuda', 'cuda:1', … or 'auto'") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {str(device)!r}: this machine has {torch.cuda.device_count()} CUDA devices; try 'cpu'"
        )
    return found
