"""The lm-eval model `kvcompress`: every score passes through a real compressed cache."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.models import huggingface
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from kvcompress.evals.answer_cache import AnswerKeys
from kvcompress.evals.arguments import model_folder, split_list, with_positions
from kvcompress.evals.fingerprint import answers_fingerprint, tokenizer_fingerprint
from kvcompress.evals.generate import split_prompt
from kvcompress.evals.generation import generate_behind
from kvcompress.evals.likelihood import Continuation, Likelihood, score
from kvcompress.evals.requests import continuation_of, tokens_behind_cut, windows_of
from kvcompress.evals.results import all_versions
from kvcompress.evals.stored import StoredKV
from kvcompress.measure.record import digest
from kvcompress.methods.base import Method, PositionMode
from kvcompress.text_form import parse
from kvcompress.wrapping import Wrapped, wrap

PADDING = 0  # is masked; lm-eval adds a padding token that the model may not have
HFLM: Any = huggingface.HFLM  # typed by its decorator as nothing but an LM


@dataclass(frozen=True)
class Use:
    """What one request of a document made of the cache."""

    task: str | None
    doc_id: int | None
    stored: StoredKV
    compressed: bool


@dataclass
class GeneratePass:
    """Requests that are generated together: all have `tail` tokens to decode. `uses` are by context."""

    tail: int
    contexts: Sequence[str] = ()
    uses: dict[str, tuple[StoredKV, bool]] = field(default_factory=dict)


class CompressedLM(HFLM):
    """A causal model of lm-eval whose attention runs over caches compressed by `method`.

    A context is prefilled without its last token and compressed; that token and what follows are decoded, so that
    even an answer of one token meets the compressed cache. Contexts of generated tasks are cut at their question
    (`split_prompt`): query-agnostic ones before it. `uses` says what each request since the start stored, and
    `truncated` how many contexts lost their beginning.
    """

    def __init__(
        self,
        pretrained: Any,
        method: Method | str = "exact",
        positions: PositionMode | None = None,
        prefill_chunk: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        """`pretrained` is a built-in name, a folder, a Hub id or a model; `options` are those of lm-eval's `hf`.

        `positions` replaces those of the method, `prefill_chunk` is how many tokens of a prompt are fed at once.
        Raises MethodError, ModelNotFound and WrapError for what cannot be used.
        """
        self.method = with_positions(parse(method), positions)
        self.prefill_chunk = prefill_chunk
        super().__init__(
            model_folder(pretrained) if isinstance(pretrained, str) else pretrained,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            **options,
        )
        self.wrapped = wrap(self.model, self.method)
        self.uses: list[Use] = []
        self.truncated = 0
        self._pass = GeneratePass(1)
        self._largest_batch: int | None = None
        self._options = options
        self._keys: AnswerKeys | None = None

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> CompressedLM:
        """The model of `pretrained=…,method=snapkv(budget=0.25, window=16)`; commas in brackets separate nothing."""
        pairs = (entry.partition("=") for entry in split_list(arg_string))
        arguments = {name.strip(): utils.handle_arg_string(value) for name, _, value in pairs}
        return cls.create_from_arg_obj(arguments, additional_config)

    @contextmanager
    def running(self) -> Iterator[Wrapped]:
        """The model wrapped, without gradients, under lm-eval's `mixed_precision_dtype` if there is one."""
        mixed = self.mixed_precision_dtype
        with (
            self.wrapped as wrapped,
            torch.no_grad(),
            torch.autocast(device_type=self.device.type, dtype=mixed, enabled=mixed is not None),
        ):
            yield wrapped

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Takes lm-eval's answer cache, with keys of its own for this model and method."""
        super().set_cache_hook(cache_hook)
        versions = all_versions()
        self._keys = AnswerKeys(lambda: digest([self.answers_fingerprint(), versions]))
        self._keys.use_in(cache_hook)

    def answers_fingerprint(self) -> str:
        """A digest of all that the answers depend on beside the requests."""
        return answers_fingerprint(self, self._options)

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """A digest of the tokenizer."""
        return tokenizer_fingerprint(self.tokenizer)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation behind its compressed context, and whether it is the greedy one.

        Raises ValueError for a continuation without a token or longer than the model.
        """
        if self.enable_thinking:
            return super().loglikelihood(requests, disable_tqdm)
        pairs = [continuation_of(self, request) for request in requests]
        items = [item for item, _ in pairs]
        self._count_truncated([too_long for _, too_long in pairs])
        self._leave_out(requests)

        def done(index: int, result: Likelihood) -> None:
            answer = result.log_probability, result.greedy
            self.cache_hook.add_partial("loglikelihood", requests[index].args, answer)

        results = self._score(items, done, disable_tqdm, "loglikelihood")
        for request, result in zip(requests, results, strict=True):
            self.uses.append(Use(request.task_name, request.doc_id, result.stored, result.compressed))
        return [(result.log_probability, result.greedy) for result in results]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text, which flows through the cache as in decoding.

        The first token is the prompt. Texts longer than the model are cut into windows as lm-eval does, unless
        the method keeps positions within the cache, and so in range. What a text stores is read at its end, and a
        text without a token scores 0.
        """
        texts = [windows_of(self, request.args[0]) for request in requests]
        items = [item for windows in texts for item in windows]
        by_length: dict[int, list[int]] = {}
        for index, item in enumerate(items):
            by_length.setdefault(len(item.fed), []).append(index)
        results: dict[int, Likelihood] = {}
        for length in sorted(by_length, reverse=True):
            same = by_length[length]
            found = self._score([items[index] for index in same], None, disable_tqdm, "loglikelihood_rolling", True)
            results.update(zip(same, found, strict=True))
        sums, first = [], 0
        for request, windows in zip(requests, texts, strict=True):
            own = [results[index] for index in range(first, first + len(windows))]
            first += len(windows)
            sums.append(sum(result.log_probability for result in own))
            self.uses += [Use(request.task_name, request.doc_id, each.stored, each.compressed) for each in own]
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, sums[-1])
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes behind each compressed context, up to a stop string; batched as lm-eval's `hf` does."""
        asked = [self._with_a_token(request) for request in requests]
        by_tail: dict[int, list[int]] = {}
        for index, request in enumerate(asked):
            tail = tokens_behind_cut(request, self._encoded(request.args[0]), self._encoded)
            by_tail.setdefault(tail or 1, []).append(index)
        self._count_truncated([self._is_too_long(request) for request in asked])
        self._leave_out(requests)
        answers: dict[int, str] = {}
        for tail in sorted(by_tail):
            self._pass = GeneratePass(tail)
            same = by_tail[tail]
            answers.update(zip(same, super().generate_until([asked[i] for i in same], disable_tqdm), strict=True))
            for index in same:
                stored, compressed = self._pass.uses[asked[index].args[0]]
                self.uses.append(Use(requests[index].task_name, requests[index].doc_id, stored, compressed))
        return [answers[index] for index in range(len(requests))]

    @property
    def prefix_token_id(self) -> int:
        """lm-eval's: BOS, else EOS, to stand for an empty context.

        Where the tokenizer has neither: a newline, or whatever else of white space or stops it has a token for.
        """
        found: int | None = super().prefix_token_id
        if found is not None:
            return found
        encoded = (self.tokenizer.encode(text, add_special_tokens=False) for text in ("\n", " ", "."))
        return next((ids[-1] for ids in encoded if ids), 0)

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        """lm-eval's, which asks for the text of EOS; empty where the tokenizer has none."""
        return "" if tokens is None else super().tok_decode(tokens, skip_special_tokens)

    def tok_batch_encode(self, strings: Sequence[str], *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """lm-eval's, which also notes whose contexts the next batch holds."""
        self._pass.contexts = strings
        return super().tok_batch_encode(list(strings), *arguments, **options)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """Generates for left-padded contexts [B, W]; the result begins with them, as that of `generate` does."""
        mask = options.pop("attention_mask", torch.ones_like(context))
        context = context.masked_fill(mask == 0, PADDING)
        # An empty stop string would end every answer at its first token.
        options["stop"] = [text for text in stop if text]
        generate = super()._model_generate

        def behind(ids: Tensor, skipped: int, **more: Any) -> Tensor:
            return generate(ids, max_length=max_length - skipped, **options, **more)

        with self.running() as wrapped:
            results = generate_behind(
                wrapped, behind, context, mask, self._pass.tail, self.prefill_chunk, options.get("num_beams") or 1
            )
        for text, result in zip(self._pass.contexts, results, strict=True):
            self._pass.uses[text] = result.stored, result.compressed
        padding: Any = self.tokenizer.pad_token_id
        return pad_sequence([result.ids for result in results], batch_first=True, padding_value=padding)

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """lm-eval's search with the plain model, once."""
        found = self._largest_batch or int(super()._detect_batch_size(requests, pos))
        self._largest_batch = found
        return found

    def _score(
        self,
        items: list[Continuation],
        done: Any,
        disable_tqdm: bool,
        what: str,
        measure_at_end: bool = False,
    ) -> list[Likelihood]:
        rows = self._detect_batch_size() if self.batch_size == "auto" else int(self.batch_size)
        quiet = disable_tqdm or self.rank != 0
        with self.running() as wrapped, tqdm(total=len(items), disable=quiet, desc=f"Running {what} requests") as bar:

            def on_result(index: int, result: Likelihood) -> None:
                bar.update()
                if done is not None:
                    done(index, result)

            return score(
                wrapped,
                items,
                rows=rows,
                longest=self.max_length,
                chunk=self.prefill_chunk,
                padding_id=PADDING,
                softmax_dtype=self.softmax_dtype,
                measure_at_end=measure_at_end,
                on_result=on_result,
            )

    def _with_a_token(self, request: Instance) -> Instance:
        """The request; one with an empty context gets the prefix token, as in `loglikelihood`."""
        if request.args[0] and self._encoded(request.args[0]):
            return request
        prefix = self.tokenizer.decode([self.prefix_token_id])
        return replace(request, arguments=(prefix, *request.args[1:]))

    def _is_too_long(self, request: Instance) -> bool:
        """Whether a context and what may be generated behind it exceed the model's length."""
        context, options = cast("tuple[str, dict[str, Any]]", request.args)
        asked: dict[str, Any] = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        return len(self._encoded(context)) > self.max_length - asked["max_gen_toks"]

    def _leave_out(self, requests: list[Instance]) -> None:
        """Keeps the answers to requests that were cut at a question out of lm-eval's answer cache."""
        for request in requests:
            if self._keys is not None and split_prompt(request.args[0], request.doc)[1]:
                self._keys.leave_out(request.request_type, request.args)

    def _encoded(self, text: str) -> list[int]:
        """The tokens of a context as they are generated from."""
        return super().tok_batch_encode([text], truncation=bool(self.truncation))[0][0].tolist()

    def _count_truncated(self, too_long: list[bool]) -> None:
        count = sum(too_long)
        self.truncated += count
        if count:
            warnings.warn(
                f"{count} of {len(too_long)} contexts are longer than the model's {self.max_length} tokens (less room "
                "to generate); they lost their beginning",
                stacklevel=3,
            )
