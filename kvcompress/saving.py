"""A cache as one safetensors file, and back. Nothing is unpickled, and nothing is built from what does not check out.

The file's metadata holds one JSON text (format version, method, model, numbers of the cache and of each layer) and a
checksum over that text and all tensors, which are named `<layer>.<name in the store>`.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvcompress.budget import LayerShape
from kvcompress.cache import CompressedCache
from kvcompress.cache_layer import CacheLayer
from kvcompress.decoder import layer_windows
from kvcompress.errors import CacheError
from kvcompress.fed_ids import FedIds
from kvcompress.fingerprint import weights_fingerprint
from kvcompress.methods.base import Method
from kvcompress.rope import rotaries
from kvcompress.saved_layer import Count, Mismatch, SavedLayer, StoreState, Strict, check_layer
from kvcompress.text_form import MethodError, parse

VERSION = 3
IDS = "ids"  # the tensor of what is known of every row's ids, one row after the other


class SavedCache(Strict):
    """What is written beside the tensors; `model` is the fingerprint of its weights and configuration.

    `known` says of how many of the `seen` tokens of a row the ids are known, the first ones.
    """

    version: int
    method: str
    model: str
    columns: Count
    seen: Annotated[list[Count], Field(min_length=1)]
    known: list[Count]
    prompt_lengths: list[Count]
    turned_back: list[Count]
    layers: list[SavedLayer]


def save_cache(cache: CompressedCache, path: str | os.PathLike[str]) -> None:
    """Writes `cache` to `path`, whole or not at all: a file that was there stays until the new one is on the disk.

    Raises CacheError for a cache that is empty, in the middle of a prompt or of a call, or that gathers for other
    methods, and where the file cannot be written.
    """
    _check_savable(cache)
    path = Path(path)
    tensors = {
        f"{layer.index}.{name}": tensor.detach().cpu().contiguous()
        for layer in cache.layers
        for name, tensor in layer.store.tensors().items()
    }
    tensors[IDS] = torch.tensor([id for row in cache.fed.rows for id in row], dtype=torch.int32)
    saved = SavedCache(
        version=VERSION,
        method=str(cache.method),
        model=cache.identity,
        columns=cache.columns,
        seen=cache.seen_tokens,
        known=[len(row) for row in cache.fed.rows],
        prompt_lengths=cache.prompt_lengths,
        turned_back=cache.turned_back,
        layers=[SavedLayer(window=layer.window, store=StoreState(**layer.store.state())) for layer in cache.layers],
    )
    text = saved.model_dump_json()
    metadata = {"kvcompress_cache": text, "sha256": _checksum(text, tensors)}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        save_file(tensors, unfinished, metadata)
        _sync(unfinished)
        unfinished.replace(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise CacheError(f"the cache could not be written to {path}: {error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def load_cache(path: str | os.PathLike[str], model: PreTrainedModel) -> CompressedCache:
    """The cache saved at `path`, to be continued with `model`, wrapped or not yet; equal to the original bit for bit.

    Raises CacheError for a file that is missing, damaged, edited, of another format version or of another model.
    """
    path = Path(path)
    text, checksum, tensors = _read(path)
    if _checksum(text, tensors) != checksum:
        raise CacheError(f"{path} was changed after it was saved (its checksum does not match); save the cache again")
    saved = _parsed(path, text)
    wrapped = getattr(model, "_kvcompress_wrapped", None)
    windows = layer_windows(model)
    identity = wrapped.identity if wrapped is not None else weights_fingerprint(model)
    if saved.model != identity:
        raise CacheError(
            f"{path} was saved for a model with fingerprint {saved.model[:12]}…, but this {type(model).__name__} has "
            f"{identity[:12]}…; load the model whose weights, configuration and dtype it was made with"
        )
    try:
        method = parse(saved.method)
        ids = tensors.pop(IDS, None)
        per_layer = _checked(saved, tensors, windows, method)
        fed = _fed(saved, ids)
    except (Mismatch, MethodError) as error:
        raise CacheError(f"{path} does not hold a usable cache: {error}; save the cache again") from error
    turning = method.position_mode == "cache"
    turns = (wrapped.rotaries() if wrapped is not None else rotaries(model)) if turning else None
    cache = CompressedCache(method, windows, identity, turns)
    cache.columns, cache.seen_tokens, cache.fed = saved.columns, list(saved.seen), fed
    cache.prompt_lengths, cache.turned_back = list(saved.prompt_lengths), list(saved.turned_back)
    cache.reused_tokens = [0] * len(saved.seen)
    device = next(model.parameters()).device
    for layer, state, own in zip(cache.layers, saved.layers, per_layer, strict=True):
        _fill(layer, state, {name: tensor.to(device) for name, tensor in own.items()})
    return cache


def _check_savable(cache: CompressedCache) -> None:
    cache.check_whole()
    if not cache.columns:
        raise CacheError("this cache has seen nothing yet, so there is nothing to save; feed it a prompt first")
    if cache.prefill_until is not None:
        raise CacheError("this cache is in the middle of a prompt; save it when the prompt is fed")
    if cache.gathers:
        raise CacheError(
            "this cache gathers observations for other methods, which are not saved; save cache.compress_as(method)"
        )


def _read(path: Path) -> tuple[str, str, dict[str, Tensor]]:
    if not path.is_file():
        raise CacheError(f"{path} is no file; give the path that cache.save(path) was called with")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CacheError(f"{path} is cut short or no safetensors file ({error}); save the cache again") from error
    if not {"kvcompress_cache", "sha256"} <= metadata.keys():
        raise CacheError(f"{path} is a safetensors file, but holds no cache saved by kvcompress; was the path meant?")
    return metadata["kvcompress_cache"], metadata["sha256"], tensors


def _parsed(path: Path, text: str) -> SavedCache:
    try:
        version = json.loads(text)["version"]
        if version == VERSION:
            return SavedCache.model_validate_json(text)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise CacheError(f"{path} does not describe a cache ({wrong}); save the cache again") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(f"{path} does not describe a cache ({error!r}); save the cache again") from None
    raise CacheError(
        f"{path} has format version {version!r}, expected {VERSION}; load it with the kvcompress that saved it"
    )


def _checked(
    saved: SavedCache, tensors: dict[str, Tensor], windows: list[int | None], method: Method
) -> list[dict[str, Tensor]]:
    """The tensors of each layer. Raises Mismatch unless the numbers fit each other, the model and the method."""
    for name in ("prompt_lengths", "turned_back", "known"):
        if len(getattr(saved, name)) != len(saved.seen):
            raise Mismatch(f"{name} are given for {len(getattr(saved, name))} rows, expected {len(saved.seen)}")
    for row, (seen, prompt, turned) in enumerate(zip(saved.seen, saved.prompt_lengths, saved.turned_back, strict=True)):
        if not 1 <= prompt <= seen <= saved.columns:
            raise Mismatch(f"row {row} saw {seen} tokens in {saved.columns} columns, {prompt} of them in the prompt")
        if turned > seen or (turned and method.position_mode != "cache"):
            raise Mismatch(f"row {row} is turned back by {turned} positions of {seen}, under {method}")
    found = [layer.window for layer in saved.layers]
    if found != windows:
        raise Mismatch(f"its layers have the windows {found}, the model's have {windows}")
    per_layer: list[dict[str, Tensor]] = [{} for _ in windows]
    for name, tensor in tensors.items():
        index, _, own = name.partition(".")
        if not index.isdecimal() or int(index) >= len(windows):
            raise Mismatch(f"tensor {name} belongs to none of its {len(windows)} layers")
        per_layer[int(index)][own] = tensor
    for index, (layer, own) in enumerate(zip(saved.layers, per_layer, strict=True)):
        try:
            check_layer(layer, own, method, saved.seen)
        except Mismatch as error:
            raise Mismatch(f"layer {index}: {error}") from error
    return per_layer


def _fed(saved: SavedCache, ids: Tensor | None) -> FedIds:
    """The ids of each row. Raises Mismatch unless there are as many as are said to be known."""
    for row, (known, seen) in enumerate(zip(saved.known, saved.seen, strict=True)):
        if known > seen:
            raise Mismatch(f"row {row} saw {seen} tokens, but {known} ids of it are known")
    if ids is None or ids.dtype != torch.int32 or list(ids.shape) != [sum(saved.known)]:
        found = "missing" if ids is None else f"{ids.dtype} {list(ids.shape)}"
        raise Mismatch(f"tensor {IDS} is {found}, expected torch.int32 {[sum(saved.known)]}")
    return FedIds([row.tolist() for row in ids.split(saved.known)], ended=saved.known != saved.seen)


def _fill(layer: CacheLayer, saved: SavedLayer, tensors: dict[str, Tensor]) -> None:
    layer.start(len(saved.store.seen))
    layer.store.load(saved.store.model_dump(), tensors)
    keys, values = (column.buffer for column in layer.store.filled)
    layer.shape = LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.element_size(), layer.window)
    layer.is_initialized = True
    layer.bound_spare()


def _checksum(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Makes sure that a file, or the name of a file in a folder, survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
