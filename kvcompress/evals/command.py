"""`kvcompress eval`: lm-eval tasks under several methods, in one table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from kvcompress.evals.results import EvalResult
    from kvcompress.methods.base import Method

console = Console()


def eval_(
    model: Annotated[str, typer.Option(help="A built-in name (smollm2-135m), a folder or a Hub id.")],
    tasks: Annotated[str, typer.Option(help="Tasks of lm-eval and of this package: needle_2k,kv_retrieval,piqa")],
    methods: Annotated[str, typer.Option(help="Methods: exact,'snapkv(budget=0.25)','kivi(bits=2)'")] = "exact",
    num_fewshot: Annotated[
        int | None, typer.Option("--num_fewshot", "--num-fewshot", min=0, help="Examples, where the task takes any.")
    ] = None,
    limit: Annotated[float | None, typer.Option(help="Documents of each task; below 1 a part of them.")] = None,
    out: Annotated[Path | None, typer.Option(help="Results folder; by default runs/eval-<model>.")] = None,
    batch_size: Annotated[
        str, typer.Option("--batch_size", "--batch-size", help='Sequences at once, or "auto".')
    ] = "4",
    seed: Annotated[int, typer.Option(help="Of generated tasks, of few-shot examples and of sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, … or auto.")] = None,
    prefill_chunk: Annotated[
        int | None, typer.Option("--prefill_chunk", "--prefill-chunk", min=1, help="Prompt tokens fed at once.")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply_chat_template", "--apply-chat-template", help="Put prompts into the chat template.")
    ] = False,
    fewshot_as_multiturn: Annotated[
        bool | None,
        typer.Option(
            "--fewshot_as_multiturn/--no_fewshot_as_multiturn",
            "--fewshot-as-multiturn/--no-fewshot-as-multiturn",
            help="Each example a turn of the chat, or all in one. By default turns where there is a template.",
        ),
    ] = None,
    metadata: Annotated[
        str | None, typer.Option(help='Settings of generated tasks as JSON: \'{"length": 4096, "depths": [0.5]}\'.')
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust_remote_code", "--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
) -> None:
    """Score lm-eval tasks through really compressed caches. What is finished is kept; the same command goes on."""
    chosen = _methods(methods)
    settings_of_tasks = _metadata(metadata, limit, seed)
    if batch_size != "auto" and not re.fullmatch(r"[1-9]\d*", batch_size):
        raise ValueError(f'--batch_size must be a number of at least 1 or "auto", got {batch_size!r}')
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise ValueError("lm-eval is not installed; install kvcompress[eval]") from None
    folder = out if out is not None else Path("runs") / f"eval-{re.sub(r'[^A-Za-z0-9._-]+', '_', model).strip('_')}"
    try:
        results = _evaluate(
            model,
            tasks,
            chosen,
            folder,
            {"num_fewshot": num_fewshot, "limit": limit, "seed": seed, "prefill_chunk": prefill_chunk}
            | {"apply_chat_template": apply_chat_template, "fewshot_as_multiturn": fewshot_as_multiturn}
            | {"metadata": settings_of_tasks},
            batch_size,
            {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code},
        )
    except KeyboardInterrupt:
        console.print(f"stopped; finished documents are safe in {folder}, the same command goes on", highlight=False)
        raise typer.Exit(130) from None
    _report(results, folder, f"{model}, seed {seed}")
    if any(result.status != "ok" for result in results):
        raise typer.Exit(1)


def _methods(text: str) -> list[Method]:
    """Each method once, in the order in which they were written. Raises MethodError, naming the nearest known one."""
    from kvcompress.evals.arguments import split_list
    from kvcompress.text_form import MethodError, parse

    chosen = list(dict.fromkeys(parse(entry) for entry in split_list(text)))
    if not chosen:
        raise MethodError("--methods is empty; write it like exact,'snapkv(budget=0.25)','kivi(bits=2)'")
    return chosen


def _metadata(text: str | None, limit: float | None, seed: int) -> dict[str, Any]:
    """What generated tasks are made from; no more of their samples than will be used."""
    if limit is not None and limit <= 0:
        raise ValueError(f"--limit must be a number of documents, or a part of them below 1, got {limit:g}")
    try:
        given = {} if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--metadata is not JSON: {error}; write it like '{{\"length\": 4096}}'") from None
    if not isinstance(given, dict):
        raise ValueError(f"--metadata must be a JSON object such as '{{\"length\": 4096}}', got {text}")
    samples = {"samples": int(limit)} if limit is not None and limit >= 1 else {}
    return {"seed": seed, **samples, **given}


def _evaluate(
    model: str,
    tasks: str,
    methods: list[Method],
    folder: Path,
    settings: dict[str, Any],
    batch_size: str,
    loading: dict[str, Any],
) -> list[EvalResult]:
    import logging

    from kvcompress.evals.arguments import split_list
    from kvcompress.evals.evaluation import Settings, evaluate_all
    from kvcompress.evals.loading import load_tasks
    from kvcompress.evals.model import CompressedLM
    from kvcompress.evals.results import ResultsFolder
    from kvcompress.measure.fits import loaded_misfits, misfits
    from kvcompress.models import load_config, load_model, load_tokenizer

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names = list(dict.fromkeys(split_list(tasks)))
    if not names:
        raise ValueError("--tasks is empty; write it like needle_2k,kv_retrieval,piqa")
    chosen = Settings(**settings)
    remote = loading["trust_remote_code"]
    tokenizer = load_tokenizer(model, trust_remote_code=remote)
    if chosen.apply_chat_template and not tokenizer.chat_template:
        raise ValueError(
            f"--apply_chat_template: the tokenizer of {model!r} has no chat template; leave the option out"
        )
    rows = 1 if batch_size == "auto" else int(batch_size)
    if chosen.limit is not None and chosen.limit >= 1:
        rows = min(rows, int(chosen.limit))
    # The prompts are not known yet: taken are the shortest of which a method could evict.
    config = load_config(model, remote)
    _refuse(lambda: misfits(config, methods, loading["dtype"], [2] * rows, remote))
    found = load_tasks(names, tokenizer, {"apply_chat_template": chosen.apply_chat_template, **chosen.metadata})
    with ResultsFolder(folder).opened() as results_folder:
        loaded = load_model(model, **loading)
        _refuse(lambda: loaded_misfits(loaded, methods))
        models = [
            CompressedLM(
                loaded, method, prefill_chunk=settings["prefill_chunk"], tokenizer=tokenizer, batch_size=batch_size
            )
            for method in methods
        ]
        total, done, running = len(found) * len(models), 0, False

        def progress(task: str, method: str, result: EvalResult | None) -> None:
            nonlocal done, running
            if result is None:
                running = True
                console.print(f"{done + 1} of {total}: {task}, {method}", highlight=False, markup=False)
                return
            done += 1
            if running and result.reused:
                console.print(f"{result.reused} answers were kept from a run that stopped", highlight=False)
            running = False
            if result.status != "ok":
                console.print(f"failed: {task}, {method}: {result.error}", highlight=False, markup=False)

        results = evaluate_all(models, found, chosen, results_folder, model, progress)
        for note in results_folder.refused:
            console.print(note, highlight=False, markup=False)
        return results


def _refuse(found: Callable[[], list[str]]) -> None:
    """Raises MethodError for methods that do not fit the model, WrapError for a model that none fits."""
    from kvcompress.errors import WrapError
    from kvcompress.text_form import MethodError

    try:
        reasons = found()
    except WrapError as error:
        raise WrapError(f"--model: {error}") from error
    if reasons:
        raise MethodError("\n".join(f"--methods: {reason}" for reason in reasons))


def _report(results: list[EvalResult], folder: Path, title: str) -> None:
    from kvcompress.evals.comparison import compare_to_exact
    from kvcompress.evals.table import CAPTION, DIFFERENCE_COLUMNS, difference_rows, markdown, rich_table, score_rows
    from kvcompress.runs.records import write_whole

    head, rows = score_rows(results)
    console.print(rich_table(head, rows, title, CAPTION))
    text = markdown(head, rows, title, CAPTION)
    comparisons = compare_to_exact(results)
    if comparisons:
        differences = difference_rows(comparisons)
        about = "Differences to exact, paired by document"
        console.print(rich_table(DIFFERENCE_COLUMNS, differences, about))
        text += "\n" + markdown(DIFFERENCE_COLUMNS, differences, about)
    write_whole(folder / "differences.json", json.dumps([each.to_dict() for each in comparisons], indent=1))
    write_whole(folder / "summary.md", text)
    console.print(f"results, lm-eval's own JSON, differences.json and summary.md are in {folder}", highlight=False)
