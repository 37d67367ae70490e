"""The lm-eval model `kvcompress`: every score passes through a real compressed cache."""

from __future__ import annotations

import json
import warnings
from collections import Counter
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
from kvcompress.evals.answers import Answers
from kvcompress.evals.arguments import model_folder, split_list, with_positions
from kvcompress.evals.fingerprint import answers_fingerprint, tokenizer_fingerprint
from kvcompress.evals.generate import split_prompt
from kvcompress.evals.generation import Prompt, Written, generate_behind
from kvcompress.evals.likelihood import Continuation, Likelihood, score
from kvcompress.evals.memory import Rows, first_rows
from kvcompress.evals.requests import continuation_of, tokens_behind_cut, windows_of
from kvcompress.evals.results import all_versions
from kvcompress.evals.stored import StoredKV
from kvcompress.fingerprint import weights_fingerprint
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
    `truncated` how many contexts lost their beginning. What `answers` keeps is not computed again.
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
        self.answers = Answers()
        self._pass = GeneratePass(1)
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
        weights_fingerprint(self.model)  # notices what no counter shows
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
        prompts, asked = [], Counter[Any]()
        for prompt in map(self._prompt, requests):
            same = prompt.ids, prompt.tail, prompt.options
            prompts.append(replace(prompt, repeat=asked[same]))
            asked[same] += 1
        self._count_truncated([len(prompt.ids) > self.max_length - prompt.room for prompt in prompts])
        self._leave_out(requests)
        results: dict[int, Written] = {}
        together: dict[tuple[int, str], list[int]] = {}
        for index, prompt in enumerate(prompts):
            known = self.answers.written(prompt)
            if known is None:
                together.setdefault((prompt.tail, prompt.options), []).append(index)
            else:
                results[index] = known
                self.cache_hook.add_partial("generate_until", requests[index].args, known.text)
        with self._bar(len(requests), disable_tqdm, "generate_until") as bar:
            bar.update(len(results))
            for _, indices in sorted(together.items(), key=lambda item: item[0][0]):
                longest_first = sorted(indices, key=lambda index: (-len(prompts[index].ids), prompts[index].text))
                for index, result in self._write_all(prompts, longest_first):
                    self.answers.keep_written(prompts[index], result)
                    results[index] = result
                    bar.update()
        for index, request in enumerate(requests):
            self.uses.append(Use(request.task_name, request.doc_id, results[index].stored, results[index].compressed))
        return [results[index].text for index in range(len(requests))]

    @property
    def tokenizer_name(self) -> str:
        """lm-eval's, and what the chat is written with: by this name it finds the requests of a chat that it kept."""
        return f"{super().tokenizer_name}-{digest([self.tokenizer_fingerprint, self.chat_template_args])}"

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

    def _prompt(self, request: Instance) -> Prompt:
        """A `generate_until` request in tokens; one with an empty context gets the prefix token."""
        text, options = cast("tuple[str, dict[str, Any]]", request.args)
        if not text or not self._encoded(text):
            text = self.tokenizer.decode([self.prefix_token_id])
            request = replace(request, arguments=(text, options))
        ids = self._encoded(text)
        asked: dict[str, Any] = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        tail = tokens_behind_cut(request, ids, self._encoded) or 1
        return Prompt(request, text, tuple(ids), tail, int(asked["max_gen_toks"]), json.dumps(options, default=str))

    def _write(self, batch: list[Prompt]) -> list[Written]:
        """What lm-eval's `hf` generates for prompts of the same options and tail, all at once."""
        self._pass = GeneratePass(batch[0].tail)
        asked, self.batch_size_per_gpu = self.batch_size_per_gpu, len(batch)
        try:
            texts = super().generate_until([prompt.request for prompt in batch], disable_tqdm=True)
        finally:
            self.batch_size_per_gpu = asked
        return [Written(text, *self._pass.uses[prompt.text]) for text, prompt in zip(texts, batch, strict=True)]

    def _write_all(self, prompts: list[Prompt], left: list[int]) -> Iterator[tuple[int, Written]]:
        """The texts of the prompts `left`, the longest of which is first, each as soon as it is known."""
        longest = min(len(prompts[left[0]].ids) + prompts[left[0]].room, self.max_length)
        rows = Rows(self._first_rows(longest), longest)
        while left:
            batch = left[: rows.count]
            found = rows.attempt(lambda batch=batch: self._write([prompts[index] for index in batch]))
            if found is not None:
                yield from zip(batch, found, strict=True)
                left = left[len(batch) :]

    def _first_rows(self, longest: int) -> int:
        return first_rows(self.batch_size, self.max_batch_size, longest, self.device)

    def _bar(self, total: int, disable_tqdm: bool, what: str) -> tqdm[Any]:
        return tqdm(total=total, disable=disable_tqdm or self.rank != 0, desc=f"Running {what} requests")

    def _score(
        self,
        items: list[Continuation],
        done: Any,
        disable_tqdm: bool,
        what: str,
        measure_at_end: bool = False,
    ) -> list[Likelihood]:
        results: dict[int, Likelihood] = {}
        with self._bar(len(items), disable_tqdm, what) as bar:

            def told(index: int, result: Likelihood) -> None:
                results[index] = result
                bar.update()
                if done is not None:
                    done(index, result)

            def rest() -> None:
                left = [index for index in range(len(items)) if index not in results]

                def on_result(place: int, result: Likelihood) -> None:
                    self.answers.keep_likelihood(items[left[place]], measure_at_end, result)
                    told(left[place], result)

                with self.running() as wrapped:
                    score(
                        wrapped,
                        [items[index] for index in left],
                        rows=rows.count,
                        longest=self.max_length,
                        chunk=self.prefill_chunk,
                        padding_id=PADDING,
                        softmax_dtype=self.softmax_dtype,
                        measure_at_end=measure_at_end,
                        on_result=on_result,
                    )

            for index, item in enumerate(items):
                known = self.answers.likelihood(item, measure_at_end)
                if known is not None:
                    told(index, known)
            longest = max((len(item.prompt) + len(item.fed) for item in items), default=1)
            rows = Rows(self._first_rows(longest), longest)
            while len(results) < len(items):
                rows.attempt(rest)
        return [results[index] for index in range(len(items))]

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
