"""Each request is scored as if it had been asked alone, whatever else is asked in the same call."""

from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")

from lm_eval.api.instance import Instance

import kvcompress as kvc
from kvcompress.evals.model import CompressedLM, Use
from tests.evals import lm

METHODS = [
    "exact",
    "snapkv(budget=2, window=1)",
    "snapkv(budget=0.5, window=1) | kivi(bits=4, group_size=2, residual=2)",
    "h2o(heavy=1, recent=1)",
    "streaming_llm(sinks=1, window=2)",
    "kivi(bits=2, group_size=2, residual=2)",
]
each_method = pytest.mark.parametrize("method", METHODS)

Request = tuple[tuple[int, ...], tuple[int, ...], int]
"""Context and continuation in tokens, and how many of the context's last are a question, compressed after it."""


@cache
def words() -> PreTrainedTokenizerFast:
    """A word a token, so that texts are joined as their tokens are."""
    tokenizer = Tokenizer(WordLevel({"<s>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<s>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", pad_token="<s>")


def text(ids: tuple[int, ...]) -> str:
    return " ".join(" abc"[token] for token in ids)


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    """Most are cut out of one beginning, so that they share contexts and continue each other."""
    token = st.integers(1, 3)
    beginning = draw(st.lists(token, min_size=9, max_size=9))
    found: list[Request] = []
    for _ in range(draw(st.integers(1, 6))):
        context, scored = draw(st.integers(0, 5)), draw(st.integers(1, 4))
        ids = beginning if draw(st.booleans()) else draw(st.lists(token, min_size=9, max_size=9))
        question = draw(st.integers(0, context))
        found.append((tuple(ids[:context]), tuple(ids[context : context + scored]), question))
    return found


def instances(asked: list[Request]) -> list[Instance]:
    arguments = [(text(context), (" " if context else "") + text(scored)) for context, scored, _ in asked]
    docs = [{"question": text(c[len(c) - q :]), "query_aware": False} if q else {} for c, _, q in asked]
    return lm.requests("loglikelihood", list(arguments), docs)


@cache
def scorer(method: str, rows: int, max_length: int | None = None) -> CompressedLM:
    return CompressedLM(lm.model(), method, tokenizer=words(), batch_size=rows, max_length=max_length)


@cache
@torch.no_grad()
def alone(method: str, request: Request) -> tuple[float, bool, bool]:
    """Log-probability, greedy, and whether a token met a compressed cache: one row, a token a call."""
    context, scored, question = request
    context = context or (0,)
    prompt = context[: max(1, len(context) - max(1, question))]
    with kvc.wrap(lm.model(), method) as wrapped:
        held = wrapped.new_cache()
        logits = [wrapped.prefill(torch.tensor([prompt]), cache=held).logits[0, -1]]
        compressed = False
        for token in (*context, *scored)[len(prompt) : -1]:
            evicted = held.kept(0).shape[-1] < int(held.seen[0])
            compressed |= evicted or held.memory()["scales"] > 0
            logits.append(wrapped(torch.tensor([[token]]), cache=held).logits[0, -1])
    found = torch.stack(logits[-len(scored) :]).log_softmax(-1)
    return float(found[range(len(scored)), scored].sum()), found.argmax(-1).tolist() == list(scored), compressed


@each_method
@settings(max_examples=6)
@given(asked=requests(), rows=st.integers(1, 6))
@example(asked=[((1,), (2, 3), 0), ((1, 2), (3,), 0)], rows=1)
@example(asked=[((1, 2, 3, 1), (2,), 3), ((1, 2), (3, 1, 2), 1)], rows=6)
def test_a_likelihood_is_that_of_its_request_alone(method: str, asked: list[Request], rows: int) -> None:
    ours = scorer(method, rows)
    ours.uses = []
    answers = ours.loglikelihood(instances(asked), disable_tqdm=True)
    for request, (value, greedy), use in zip(asked, answers, ours.uses, strict=True):
        expected = alone(method, request)
        assert value == pytest.approx(expected[0], abs=1e-3), request
        assert (greedy, use.compressed) == expected[1:], request


@cache
def text_alone(method: str, ids: tuple[int, ...]) -> tuple[float, list[Use]]:
    """A text as the only one of its call, cut into windows of three tokens."""
    ours = scorer(method, 1, 3)
    ours.uses = []
    return ours.loglikelihood_rolling(lm.requests("loglikelihood_rolling", [(text(ids),)]), True)[0], ours.uses


@pytest.mark.parametrize("method", [METHODS[0], METHODS[3], METHODS[5]])
@settings(max_examples=3)
@given(
    texts=st.lists(st.lists(st.integers(1, 2), max_size=8).map(tuple), min_size=1, max_size=4), rows=st.integers(1, 4)
)
# Their last windows are fed the same and score one token and two.
@example(texts=[(1, 2, 1, 1), (2, 1, 2, 1, 1)], rows=2)
def test_a_text_is_scored_as_alone(method: str, texts: list[tuple[int, ...]], rows: int) -> None:
    expected = [text_alone(method, ids) for ids in texts]
    ours = scorer(method, rows, 3)
    ours.uses = []
    values = ours.loglikelihood_rolling(lm.requests("loglikelihood_rolling", [(text(ids),) for ids in texts]), True)
    assert values == pytest.approx([value for value, _ in expected], abs=1e-3)
    assert [(use.stored, use.compressed) for use in ours.uses] == [
        (use.stored, use.compressed) for _, uses in expected for use in uses
    ]
