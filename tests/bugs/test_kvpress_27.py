"""NVIDIA/kvpress #27: with several questions on one context, the second saw the tokens of the first and of its answer.

The kind: what is asked of a fork leaves no trace in the cache it came from, nor in another fork.
"""

import pytest
import torch

import kvcompress as kvc
from tests.bugs.common import GREEDY, METHODS, text
from tests.families import tiny


@pytest.mark.parametrize("method", METHODS)
def test_every_question_is_answered_as_if_it_were_the_only_one(method: str) -> None:
    context, questions = text(1, 40), [text(1, columns, seed=columns) for columns in (12, 3, 7)]
    with kvc.wrap(tiny("llama"), method) as wrapped:
        alone = []
        for question in questions:
            cache = wrapped.new_cache()
            wrapped.prefill(context, cache=cache)
            alone.append(wrapped.generate(question, cache=cache, **GREEDY))
        shared = wrapped.new_cache()
        wrapped.prefill(context, cache=shared)
        before = (shared.nbytes, shared.seen.tolist(), shared.kept(0), shared.kept(1))
        for question, expected in zip(questions, alone, strict=True):
            fork = shared.fork()
            assert torch.equal(wrapped.generate(question, cache=fork, **GREEDY), expected)
            assert fork.seen.tolist() == [40 + question.shape[1] + 5]
        assert (shared.nbytes, shared.seen.tolist()) == before[:2]
        assert torch.equal(shared.kept(0), before[2]) and torch.equal(shared.kept(1), before[3])


@pytest.mark.parametrize("method", METHODS)
def test_questions_asked_in_one_batch_do_not_see_each_other(method: str) -> None:
    context, questions = text(1, 40), text(3, 8, seed=5)
    with kvc.wrap(tiny("llama"), method) as wrapped:
        cache = wrapped.new_cache()
        wrapped.prefill(context, cache=cache)
        together = wrapped.generate(questions, cache=cache.fork(3), **GREEDY)
        for row in range(3):
            alone = wrapped.generate(questions[row : row + 1], cache=cache.fork(), **GREEDY)
            assert torch.equal(together[row], alone[0])
