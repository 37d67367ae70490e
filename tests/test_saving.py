"""Saving a cache and continuing from the file: equal to the original bit for bit, or refused."""

import copy
import hashlib
import json
import pickle
import resource
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import kvcompress as kvc
from kvcompress import CacheError, CompressedCache, Wrapped
from tests.families import OPTIONS, build, tiny

KIVI = "kivi(bits=2, group_size=8, residual=8)"
SNAPKV = "snapkv(budget=16, window=4)"
METHODS = [
    "exact",
    "streaming_llm(sinks=2, window=12)",
    "streaming_llm(sinks=2, window=12, positions='original')",
    "h2o(budget=0.5)",
    SNAPKV,
    "snapkv(budget=0.5, window=4, positions='cache')",
    KIVI,
    "kivi(bits=4, group_size=16, residual=16)",
    f"streaming_llm(sinks=2, window=16) | {KIVI}",
    f"h2o(heavy=8, recent=8) | {KIVI}",
    f"{SNAPKV} | {KIVI}",
]
FOREVER = HealthCheck.function_scoped_fixture


@once
def text() -> tuple[Tensor, Tensor]:
    """Two rows of 40 ids and their mask; the second has 13 columns of padding."""
    ids = torch.randint(2, 61, (2, 40), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    return ids, mask


def filled(wrapped: Wrapped, calls: int = 2) -> CompressedCache:
    """A cache after a padded prompt and a few decoding calls."""
    ids, mask = text()
    cache = wrapped.new_cache()
    wrapped.prefill(ids, mask, cache)
    for column in range(calls):
        wrapped(ids[:, column : column + 1], cache=cache)
    return cache


def continuation(wrapped: Wrapped, cache: CompressedCache) -> list[Tensor]:
    """All that a user can see of further calls: one token, several, a new prompt, generation."""
    ids, _ = text()
    rows = ids[: cache.rows] if cache.rows <= 2 else ids[:1].expand(cache.rows, -1)
    seen = [wrapped(rows[:, 5:6], cache=cache).logits, wrapped(rows[:, 6:15], cache=cache).logits]
    seen += [wrapped.prefill(rows[:, 15:29], cache=cache).logits]
    seen += [wrapped.generate(rows[:, 29:32], cache=cache, max_new_tokens=5, do_sample=False)]
    return [*seen, cache.seen, *(cache.kept(layer) for layer in range(len(cache.layers)))]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), index


@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", method) for method in METHODS] + [("gemma3_text", METHODS[index]) for index in (1, 9)],
)
def test_continuing_from_the_file_is_continuing_from_the_cache(family: str, method: str, tmp_path: Path) -> None:
    model, path = tiny(family), tmp_path / "prefix.safetensors"
    with kvc.wrap(model, method) as wrapped:
        original = filled(wrapped)
        original.save(path)
        loaded = kvc.load_cache(path, model)
        exact_bytes = original.exact_nbytes
        assert (str(loaded.method), loaded.exact_nbytes) == (str(original.method), exact_bytes)
        sizes = [cache.memory() for cache in (original, loaded)]
        assert [size | {"spare": 0} for size in sizes] == [sizes[0] | {"spare": 0}] * 2
        assert loaded.nbytes == sum(sizes[1].values())
        fork = original.fork()  # like the loaded one, it has to make room first
        expected = continuation(wrapped, fork)
        assert_same(continuation(wrapped, loaded), expected)
        assert loaded.memory()["spare"] <= 1.1 * fork.memory()["spare"]
    other = build(family, **OPTIONS[family])
    later = kvc.load_cache(path, other)
    with kvc.wrap(other, method) as wrapped:
        assert_same(continuation(wrapped, later), expected)


def test_positions_that_were_brought_back_are_brought_back_after_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcompress.cache.REBASE_AFTER", 4)
    model = tiny("llama")
    with kvc.wrap(model, "streaming_llm(sinks=2, window=12)") as wrapped:
        original = filled(wrapped, calls=6)
        assert any(original.turned_back)
        original.save(tmp_path / "cache")
        loaded = kvc.load_cache(tmp_path / "cache", model)
        assert_same(continuation(wrapped, loaded), continuation(wrapped, original))


def test_a_fork_into_a_batch_and_bfloat16(tmp_path: Path) -> None:
    model = build("llama", **OPTIONS["llama"]).to(torch.bfloat16)
    with kvc.wrap(model, "h2o(heavy=6, recent=6)") as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(text()[0][:1], cache=cache)
        fork = cache.fork(3)
        fork.save(tmp_path / "cache")
        loaded = kvc.load_cache(tmp_path / "cache", model)
        assert loaded.layers[0].store.tensors()["keys"].dtype == torch.bfloat16
        assert_same(continuation(wrapped, loaded), continuation(wrapped, fork))


def test_saving_changes_nothing(tmp_path: Path) -> None:
    with kvc.wrap(tiny("llama"), f"{SNAPKV} | {KIVI}") as wrapped:
        plain, saved = filled(wrapped), filled(wrapped)
        saved.save(tmp_path / "cache")
        assert saved.nbytes == plain.nbytes
        assert_same(continuation(wrapped, saved), continuation(wrapped, plain))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a saved cache looks like on the disk, for a dense store, a packed one and one with both kinds of layers."""
    folder, found = tmp_path_factory.mktemp("saved"), {}
    for name, family, method in (
        ("h2o", "llama", "h2o(heavy=6, recent=6)"),
        ("packed", "llama", f"h2o(heavy=8, recent=8) | {KIVI}"),
        ("sinks", "llama", f"streaming_llm(sinks=2, window=16) | {KIVI}"),
        ("sliding", "gemma3_text", "exact"),
    ):
        with kvc.wrap(tiny(family), method) as wrapped:
            filled(wrapped).save(folder / name)
        found[name] = (folder / name).read_bytes()
    return found


def refused(content: bytes, path: Path, family: str = "llama") -> str:
    """Why the file is refused, which must name it."""
    path.write_bytes(content)
    with pytest.raises(CacheError) as error:
        kvc.load_cache(path, tiny(family))
    assert str(path) in str(error.value)
    return str(error.value)


@given(st.data())
@settings(suppress_health_check=[FOREVER])
def test_a_file_cut_short_anywhere_is_refused(files: dict[str, bytes], tmp_path: Path, data: st.DataObject) -> None:
    content = files["packed"]
    message = refused(content[: data.draw(st.integers(0, len(content) - 1))], tmp_path / "cut")
    assert "cut short" in message and "save the cache again" in message


@given(st.data())
@settings(suppress_health_check=[FOREVER])
def test_a_file_with_any_byte_changed_is_refused(files: dict[str, bytes], tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(files["packed"])
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    assert refused(bytes(content), tmp_path / "changed")


def forged(content: bytes, path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> bytes:
    """The file after `change`, with the checksum that belongs to it."""
    path.write_bytes(content)
    with safe_open(path, framework="pt") as file:
        numbers = json.loads(file.metadata()["kvcompress_cache"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(numbers, tensors)
    text = json.dumps(numbers)
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    save_file(tensors, path, {"kvcompress_cache": text, "sha256": digest.hexdigest()})
    return path.read_bytes()


def test_a_forged_file_without_a_change_is_as_good_as_the_original(files: dict[str, bytes], tmp_path: Path) -> None:
    """So the refusals below are for the change, not for the forging."""
    for name, content in files.items():
        model = tiny("gemma3_text" if name == "sliding" else "llama")
        (tmp_path / "good").write_bytes(forged(content, tmp_path / "copy", lambda *_: None))
        assert kvc.load_cache(tmp_path / "good", model).seen.tolist() == [42, 29]


def put(*keys: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    """Sets the number under these keys to the last of them."""

    def change(numbers: dict[str, Any], _: dict[str, Tensor]) -> None:
        for key in keys[:-2]:
            numbers = numbers[key]
        numbers[keys[-2]] = keys[-1]

    return change


def alter(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = function(tensors[name].clone())

    return change


def at(*where: Any) -> Callable[[Tensor], Tensor]:
    """Puts the last of `where` at the index that the others are."""

    def write(tensor: Tensor) -> Tensor:
        tensor[where[:-1]] = where[-1]
        return tensor

    return write


STORE = ("layers", 1, "store")
FORGERIES = {
    "another version": ("h2o", put("version", 1), "format version 1, expected 3"),
    "no version": ("h2o", lambda numbers, _: numbers.pop("version"), "does not describe a cache"),
    "an unknown key": ("h2o", put("owner", "me"), "owner"),
    "a number as text": ("h2o", put("columns", "42"), "columns"),
    "a truth for a number": ("h2o", put("seen", 0, True), "seen"),
    "a negative number": ("h2o", put("seen", 0, -1), "seen"),
    "no rows": ("h2o", put("seen", []), "seen"),
    "an unknown method": ("h2o", put("method", "h3o(heavy=6, recent=6)"), "unknown method 'h3o'"),
    "code for a method": ("h2o", put("method", "__import__('os').abort()"), "cannot read the method"),
    "a method without scores": ("h2o", put("method", "exact"), "with_scores"),
    "a packing method": ("h2o", put("method", f"h2o(heavy=8, recent=8) | {KIVI}"), "were to be packed"),
    "other bits": (
        "packed",
        put("method", "h2o(heavy=8, recent=8) | kivi(bits=4, group_size=8, residual=8)"),
        "tensor keys.words is",
    ),
    "more tokens than columns": ("h2o", put("seen", 0, 43), "row 0 saw 43 tokens in 42 columns"),
    "a prompt longer than the text": ("h2o", put("prompt_lengths", 1, 30), "row 1"),
    "more ids than tokens": ("h2o", put("known", 1, 30), "row 1 saw 29 tokens, but 30 ids of it are known"),
    "ids of one row": ("h2o", put("known", [42]), "known are given for 1 rows"),
    "fewer ids than are known": ("h2o", alter("ids", lambda ids: ids[1:].clone()), "tensor ids is torch.int32 [70]"),
    "ids of another dtype": ("h2o", alter("ids", lambda ids: ids.float()), "tensor ids is torch.float32"),
    "no ids": ("h2o", lambda _, tensors: tensors.pop("ids"), "tensor ids is missing"),
    "a missing prompt length": ("h2o", put("prompt_lengths", [40]), "prompt_lengths are given for 1 rows"),
    "turned back where keys are not turned": ("h2o", put("turned_back", 0, 3), "turned back by 3"),
    "a window": ("h2o", put("layers", 0, "window", 8), "windows"),
    "a layer too few": ("h2o", lambda numbers, _: numbers["layers"].pop(), "windows"),
    "a layer that saw less": ("h2o", put(*STORE, "seen", 0, 41), "layer 1: seen"),
    "a row of no slots": ("h2o", put(*STORE, "lengths", 0, 0), "layer 1: row 0 stores 0 slots"),
    "more slots than tokens": (
        "h2o",
        put(*STORE, "lengths", 1, 30),
        "layer 1: row 1 stores 30 slots, expected 1 to 29",
    ),
    "slots that no tensor has": ("h2o", put(*STORE, "lengths", [13, 12]), "tensor keys is [2, 2, 12, 16]"),
    "fewer lengths than rows": ("h2o", put(*STORE, "lengths", [12]), "number of lengths"),
    "keys of another width": ("h2o", alter("1.keys", lambda keys: keys[..., 0].contiguous()), "tensor keys"),
    "values of one head": ("h2o", alter("1.values", lambda values: values[:, :1].contiguous()), "tensor values"),
    "whole numbers for keys": ("h2o", alter("1.keys", lambda keys: keys.int()), "tensor keys is torch.int32"),
    "no keys": ("h2o", lambda _, tensors: tensors.pop("0.keys"), "layer 0: tensor keys is missing"),
    "a tensor too many": ("h2o", lambda _, tensors: tensors.update({"0.more": torch.zeros(1)}), "'more'"),
    "a tensor of no layer": ("h2o", lambda _, tensors: tensors.update({"7.keys": torch.zeros(1)}), "tensor 7.keys"),
    "a tensor of no number": ("h2o", lambda _, tensors: tensors.update({"keys": torch.zeros(1)}), "tensor keys"),
    "positions of another dtype": ("h2o", alter("0.positions", lambda x: x.long()), "positions is torch.int64"),
    "positions past the text": ("h2o", alter("0.positions", at(0, 0, 11, 42)), "positions do not ascend"),
    "positions that descend": ("h2o", alter("0.positions", at(0, 0, 5, 0)), "positions do not ascend"),
    "a hole where there are none": ("h2o", alter("0.positions", at(1, 1, 5, -1)), "no holes"),
    "evictions without positions": ("h2o", lambda _, tensors: tensors.pop("0.positions"), "lengths without"),
    "a score that is NaN": ("h2o", alter("1.scores", at(0, 1, 3, torch.nan)), "a score"),
    "scores of another dtype": ("h2o", alter("1.scores", lambda scores: scores.half()), "scores is torch.float16"),
    "keys packed in part of a group": ("packed", put(*STORE, "packed_keys", 0, 9), "no multiple of the group size 8"),
    "more packed than there is": ("packed", put(*STORE, "packed_values", 0, 400), "more than its"),
    "no count of packed keys": ("packed", lambda n, _: n["layers"][1]["store"].pop("packed_keys"), "packed_keys"),
    "codes of another dtype": ("packed", alter("1.keys.words", lambda words: words.int()), "keys.words is torch.int32"),
    "codes cut short": ("packed", alter("1.values.words", lambda words: words[:, :, :-1].contiguous()), "values.words"),
    "scales of another width": ("packed", alter("1.values.scale", lambda x: x[..., :1].contiguous()), "values.scale"),
    "no minima": ("packed", lambda _, tensors: tensors.pop("1.keys.minimum"), "keys.minimum is missing"),
    "a residual cut short": ("packed", alter("0.keys", lambda x: x[:, :, :-1].contiguous()), "tensor keys is"),
    "sinks missing": ("sinks", lambda _, tensors: tensors.pop("0.front.keys"), "front.keys is missing"),
    "one sink apart": ("sinks", put(*STORE, "fronts", 0, 1), "row 0 has 1 first tokens apart, expected 2"),
    "a sliding layer that is longer": ("sliding", put("layers", 0, "window", 9), "windows"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_file_that_contradicts_itself_is_refused(name: str, files: dict[str, bytes], tmp_path: Path) -> None:
    kind, change, reason = FORGERIES[name]
    content = forged(files[kind], tmp_path / "forged", change)
    assert reason in refused(content, tmp_path / "cache", "gemma3_text" if kind == "sliding" else "llama")


def test_a_cache_of_other_weights_dtype_or_layers_is_refused(files: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.write_bytes(files["h2o"])
    others: list[PreTrainedModel] = [copy.deepcopy(tiny("llama")) for _ in range(2)] + [tiny("gemma3_text")]
    others[0].get_input_embeddings().weight.data[3, 3] += 1
    others[1].to(torch.bfloat16)
    for other in others:
        with pytest.raises(CacheError, match=r"saved for a model with fingerprint \w{12}…, but this \w+ has \w{12}…"):
            kvc.load_cache(path, other)


class Trap:
    """Tells on whoever unpickles it."""

    sprung: list[str] = []  # noqa: RUF012

    def __reduce__(self) -> tuple[Any, ...]:
        return Trap.sprung.append, ("unpickled",)


def test_other_files_are_refused_and_never_unpickled(tmp_path: Path) -> None:
    path, model = tmp_path / "cache", tiny("llama")
    with pytest.raises(CacheError, match="is no file; give the path"):
        kvc.load_cache(path, model)
    with pytest.raises(CacheError, match="is no file"):
        kvc.load_cache(tmp_path, model)
    for content in (b"", b"a text", pickle.dumps(Trap())):
        assert "no safetensors file" in refused(content, path)
    torch.save(Trap(), path)
    assert "no safetensors file" in refused(path.read_bytes(), path)
    assert not Trap.sprung
    save_file({"keys": torch.zeros(2)}, path)
    assert "holds no cache saved by kvcompress" in refused(path.read_bytes(), path)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    with kvc.wrap(tiny("llama"), "exact") as wrapped:
        cache = filled(wrapped)
        cache.save(path)
        before = path.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
        try:
            with pytest.raises(CacheError, match="could not be written to"):
                cache.save(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]
        (tmp_path / "folder").mkdir()
        for nowhere in (tmp_path / "missing" / "cache", path / "cache", tmp_path / "folder"):
            with pytest.raises(CacheError, match="could not be written to") as error:
                cache.save(nowhere)
            assert str(nowhere) in str(error.value)
        wrapped(text()[0][:, :1], cache=cache)
        cache.save(path)
        assert kvc.load_cache(path, wrapped.model).seen.tolist() == [43, 30]
        assert sorted(tmp_path.iterdir()) == [path, tmp_path / "folder"]


def test_what_cannot_be_saved_says_why(tmp_path: Path) -> None:
    ids, _ = text()
    with kvc.wrap(tiny("llama"), "exact") as wrapped:
        with pytest.raises(CacheError, match="has seen nothing yet"):
            wrapped.new_cache().save(tmp_path / "cache")
        gathering = wrapped.new_cache(gather_for=[kvc.SnapKV(16, window=4)])
        wrapped.prefill(ids, cache=gathering)
        with pytest.raises(CacheError, match=r"save cache\.compress_as"):
            gathering.save(tmp_path / "cache")
        gathering.compress_as(kvc.SnapKV(16, window=4)).save(tmp_path / "cache")
        halfway = wrapped.new_cache()
        with halfway.prefilling([40, 40], 40):
            wrapped(ids[:, :20], cache=halfway)
            with pytest.raises(CacheError, match="in the middle of a prompt"):
                halfway.save(tmp_path / "cache")
        broken = filled(wrapped)
        broken.begin_call(1, [1, 1])
        with pytest.raises(CacheError, match="failed midway"):
            broken.save(tmp_path / "cache")
