"""Batches as large as memory takes: with the requests themselves, and no document lost where it runs out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")

from kvcompress.evals.evaluation import Settings, evaluate_all
from kvcompress.evals.memory import OutOfMemory, is_out_of_memory
from kvcompress.evals.results import ResultsFolder
from tests.evals import lm
from tests.evals.lm import ASK, flat

METHODS = ["exact", "snapkv(budget=24, window=4)", "kivi(bits=2, group_size=8, residual=8)"]


@contextmanager
def memory_for(rows: int, tokens: int = 10**9) -> Iterator[list[tuple[int, int]]]:
    """A model that really asks for more memory than there is for more rows or columns; the shapes of its calls."""
    shapes: list[tuple[int, int]] = []

    def forward(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        ids = arguments[0] if arguments else options["input_ids"]
        shapes.append(tuple(ids.shape))
        if ids.shape[0] > rows or ids.shape[1] > tokens:
            torch.empty(2**60)

    hook = lm.model().register_forward_pre_hook(forward, with_kwargs=True)
    try:
        yield shapes
    finally:
        hook.remove()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ask", ASK)
def test_where_memory_runs_out_fewer_rows_give_the_same(ask: Callable[[Any], Any], method: str) -> None:
    alone = lm.compressed(method, batch_size=1)
    expected = flat(ask(alone))
    ours = lm.compressed(method, batch_size=5)
    with memory_for(rows=2) as shapes, pytest.warns(UserWarning, match="out of memory, going on with 2 rows"):
        found = flat(ask(ours))
    assert found == pytest.approx(expected, abs=1e-3)
    assert max(rows for rows, _ in shapes) > 2 and shapes[-1][0] <= 2
    assert {use.doc_id: use.stored for use in ours.uses} == {use.doc_id: use.stored for use in alone.uses}
    assert len(ours.uses) == len(alone.uses)


@pytest.mark.parametrize("ask", ASK)
def test_auto_runs_the_requests_and_nothing_longer(ask: Callable[[Any], Any], capsys: Any) -> None:
    expected = flat(ask(lm.compressed("exact", batch_size=1)))
    with memory_for(rows=64) as shapes:
        found = flat(ask(lm.compressed("exact", batch_size="auto")))
    assert found == pytest.approx(expected, abs=1e-3)
    # All at once, though never the model's full length.
    assert max(rows for rows, _ in shapes) >= 2
    assert sum(rows * columns for rows, columns in shapes) < 64 * lm.LENGTH
    assert max(columns for _, columns in shapes) < lm.LENGTH
    assert "batch size" not in capsys.readouterr().out


def test_auto_takes_fewer_rows_of_longer_requests() -> None:
    rows = {}
    for length in (20, 200):
        lm_eval_model = lm.compressed("exact", batch_size="auto", max_batch_size=16)
        rows[length] = [lm_eval_model._first_rows(length), lm_eval_model._first_rows(100 * length)]
    assert rows == {20: [16, 4], 200: [16, 1]}


@pytest.mark.parametrize("ask", ASK)
def test_a_sequence_that_does_not_fit_alone_is_named(ask: Callable[[Any], Any]) -> None:
    with (
        memory_for(rows=0),
        pytest.warns(UserWarning, match="going on with 1 rows"),
        pytest.raises(OutOfMemory, match=r"a sequence of \d+ tokens does not fit into memory even alone .*allocate"),
    ):
        ask(lm.compressed("exact", batch_size=2))


def test_other_errors_are_no_lack_of_memory() -> None:
    for error in (RuntimeError("shape mismatch"), ValueError("CUDA out of memory."), KeyError("memory")):
        assert not is_out_of_memory(error)
    for text in ("CUDA out of memory. Tried to allocate 2 GiB", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"):
        assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(torch.OutOfMemoryError("out")) and is_out_of_memory(MemoryError())


def test_a_method_without_enough_memory_fails_alone(tmp_path: Any) -> None:
    task = lm.multiple_choice(3)
    models = [lm.compressed("exact", batch_size=2), lm.compressed(METHODS[1], batch_size=2, prefill_chunk=16)]
    with ResultsFolder(tmp_path).opened() as folder, memory_for(rows=2, tokens=20):
        results = evaluate_all(models, {"made": task}, Settings(), folder, "tiny")
    assert [result.status for result in results] == ["failed", "ok"]
    assert "OutOfMemory: a sequence of" in (results[0].error or "")
    assert len(results[1].samples) == 3
