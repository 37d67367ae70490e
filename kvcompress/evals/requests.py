"""lm-eval's requests in tokens: what of each is compressed, what is decoded, and what is scored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from lm_eval import utils
from lm_eval.api.instance import Instance

from kvcompress.evals.generate import split_prompt
from kvcompress.evals.likelihood import Continuation, behind_context


def continuation_of(lm: Any, request: Instance) -> tuple[Continuation, bool]:
    """A `loglikelihood` request in tokens, and whether it was too long for `lm` and lost its beginning.

    An empty context is lm-eval's prefix token. Raises ValueError for a continuation without a token or longer than
    the model.
    """
    context, continuation = cast("tuple[str, str]", request.args)
    if context:
        before, after = lm._encode_pair(context, continuation)
    else:
        before, after = [], lm.tok_encode(continuation, add_special_tokens=False)
        if len(after) > 1 and after[0] == lm.prefix_token_id:
            before, after = after[:1], after[1:]
    before = before or [lm.prefix_token_id]
    where = f"task {request.task_name}, document {request.doc_id}: the continuation {continuation[:60]!r}"
    if not after:
        raise ValueError(f"{where} adds no token to its context, so it has no likelihood; correct the document")
    if len(after) > lm.max_length:
        raise ValueError(
            f"{where} has {len(after)} tokens, more than the model's {lm.max_length}; "
            "shorten it, or take a model of a longer context"
        )
    room = lm.max_length + 1 - len(after)
    tail = tokens_behind_cut(request, before, lm.tok_encode)
    return behind_context(before[-room:], after, tail or 1), len(before) > room


def windows_of(lm: Any, text: str) -> list[Continuation]:
    """A `loglikelihood_rolling` request in tokens: lm-eval's prefix token and the text, all but the first decoded.

    A text longer than the model is cut into lm-eval's windows, unless `lm.method` keeps rotary positions within the
    cache, and so in range.
    """
    ids = lm.tok_encode(text)
    evicting = lm.method.evicting
    flows = evicting is not None and evicting.acts == "every_call" and evicting.positions == "cache"
    windows = utils.get_rolling_token_windows(
        token_list=ids,
        prefix_token=lm.prefix_token_id,
        max_seq_len=max(lm.max_length, len(ids)) if flows else lm.max_length,
        context_len=1,
    )
    return [Continuation(tuple(fed[:1]), tuple(fed[1:]), tuple(scored)) for fed, scored in windows]


def tokens_behind_cut(request: Instance, ids: list[int], encode: Callable[[str], list[int]]) -> int | None:
    """How many of a context's tokens `ids` reach behind where its document cuts it; None where it does not.

    A token that lies over the cut belongs to what is behind it, so that nothing of a question is compressed early.
    """
    before, after = split_prompt(request.args[0], request.doc)
    if not after:
        return None
    whole = 0
    for mine, cut in zip(ids, encode(before), strict=False):
        if mine != cut:
            break
        whole += 1
    return max(1, len(ids) - whole)
