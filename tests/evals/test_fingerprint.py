"""Every argument of lm-eval's `hf` is in the key of an answer, or changes none."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")

from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM

from kvcompress.evals.evaluation import Settings, evaluate_all
from kvcompress.evals.fingerprint import WITHOUT_EFFECT, answers_fingerprint, tokenizer_fingerprint
from kvcompress.evals.model import CompressedLM
from kvcompress.evals.results import ResultsFolder
from tests.evals import lm
from tests.evals.tiny import byte_level, trained

METHOD = "snapkv(budget=6, window=2)"
DEFAULTS = {name: each.default for name, each in inspect.signature(HFLM.__init__).parameters.items() if name != "self"}
"""What `hf` takes. The last, `kwargs`, goes on to `from_pretrained`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its tokenizer, saved."""
    path = tmp_path_factory.mktemp("model")
    lm.model().save_pretrained(path)
    trained().save_pretrained(path)
    return path


def made(**options: Any) -> CompressedLM:
    return CompressedLM(
        **{"pretrained": lm.model(), "method": METHOD, "tokenizer": trained(), "device": "cpu"} | options
    )


def answers(model: Any) -> list[Any]:
    """To requests of all kinds: without a context, with one of a token, and with one of more than 12."""
    contexts = ["", "a", lm.text(60)]
    options = {"until": [], "max_gen_toks": 6}
    return [
        *model.loglikelihood(lm.requests("loglikelihood", [(context, " kilo ba") for context in contexts])),
        *model.loglikelihood_rolling(lm.requests("loglikelihood_rolling", [(text,) for text in contexts])),
        *model.generate_until(lm.requests("generate_until", [(context, options) for context in contexts])),
    ]


@pytest.mark.parametrize("name", [name for name in DEFAULTS if name not in WITHOUT_EFFECT])
def test_an_argument_is_in_the_key(name: str) -> None:
    ours = made()
    key = ours.answers_fingerprint()
    assert answers_fingerprint(ours, {name: f"another {name}"}) != key
    if name != "kwargs":
        assert answers_fingerprint(ours, {name: DEFAULTS[name]}) == key  # written out or left out


def test_arguments_without_effect_change_no_answer(folder: Path) -> None:
    values: dict[str, Any] = {
        "pretrained": str(folder),
        "tokenizer": str(folder),
        "device": "cpu:0",
        "batch_size": 3,
        "max_batch_size": 2,
        "logits_cache": False,
    }
    assert values.keys() == WITHOUT_EFFECT.keys()
    plain, changed = made(tokenizer=AutoTokenizer.from_pretrained(folder)), made(**values)
    assert changed.answers_fingerprint() == plain.answers_fingerprint()
    for mine, theirs in zip(answers(changed), answers(plain), strict=True):
        assert mine == (theirs if isinstance(theirs, str) else pytest.approx(theirs, abs=1e-3))


@pytest.mark.filterwarnings("ignore:.*lost their beginning")
def test_answers_under_another_setting_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = str(tmp_path / "answers.db")
    plain = answers(CachingLM(made(), kept))
    changes: dict[str, Any] = {
        "softmax_dtype": "bfloat16",
        "mixed_precision_dtype": "bfloat16",
        "think_end_token": "a",
        "max_length": 12,
        "prefix_token_id": 7,
        "tokenizer": PreTrainedTokenizerFast(tokenizer_object=byte_level(), pad_token="a"),
    }
    for name, value in changes.items():
        expected = answers(made(**{name: value}))
        assert expected != plain, name
        assert answers(CachingLM(made(**{name: value}), kept)) == expected, name
    with monkeypatch.context() as patch:
        patch.setattr(lm.model().generation_config, "repetition_penalty", 3.0)
        expected = answers(made())
        assert expected != plain
        assert answers(CachingLM(made(), kept)) == expected
    monkeypatch.setattr(CompressedLM, "running", None)  # from here on an answer is found or nothing is
    assert answers(CachingLM(made(), kept)) == plain


def test_a_finished_result_is_known_again_by_its_model_and_its_examples(tmp_path: Path) -> None:
    def key(ours: CompressedLM, example: str) -> str:
        task = lm.multiple_choice(1)
        task.fewshot_cfg.samples = [{**lm.items(1)[0], "query": example}]
        with ResultsFolder(tmp_path).opened() as results:
            (result,) = evaluate_all([ours], {"made": task}, Settings(num_fewshot=1), results, "tiny")
        assert result.status == "ok", result.error
        return result.key

    first = key(made(), "ba")
    assert key(made(batch_size=2), "ba") == first
    assert len({first, key(made(softmax_dtype="bfloat16"), "ba"), key(made(), "kilo")}) == 3


def test_a_tokenizer_is_known_again_and_told_from_others(folder: Path) -> None:
    def loaded() -> PreTrainedTokenizerFast:
        return AutoTokenizer.from_pretrained(folder)

    used, talkative, other_end, longer = loaded(), loaded(), loaded(), loaded()
    used(["a kilo", "b"], padding=True, truncation=True, max_length=2, return_tensors="pt")
    assert tokenizer_fingerprint(used) == tokenizer_fingerprint(loaded())
    talkative.chat_template = "{{ messages }}"
    other_end.eos_token = "<s>"
    longer.add_tokens(["kilo"])
    lower = Tokenizer.from_str(
        trained().backend_tokenizer.to_str().replace('"ignore_merges":false', '"ignore_merges":true')
    )
    others = [talkative, other_end, longer, PreTrainedTokenizerFast(tokenizer_object=lower)]
    assert len({tokenizer_fingerprint(each) for each in [used, *others]}) == 1 + len(others)
