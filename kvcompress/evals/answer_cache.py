"""Keys of lm-eval's answer cache (`use_cache`) that tell methods and models apart.

lm-eval's own key is a hash of the request alone, so it would hand the answers of one method to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lm_eval.api.model import CacheHook, hash_args


class AnswerKeys:
    """Keys that begin with what the answers depend on when they are asked for. Requests cut at a question have none.

    The query-aware and the query-agnostic form of a task make the same requests, only their documents differ.
    """

    def __init__(self, depends_on: Callable[[], str]) -> None:
        self.depends_on = depends_on
        self.cut: set[str] = set()

    def use_in(self, hook: CacheHook) -> None:
        """Makes lm-eval look up and store answers under these keys."""
        if hook.dbdict is not None:
            hook.dbdict.encode_key = self.key

    def leave_out(self, kind: str, arguments: Iterable[Any]) -> None:
        """Keeps the answer to a request of `kind` (`generate_until`, …) from being found again."""
        self.cut.add(hash_args(kind, arguments))

    def key(self, request_hash: str) -> str | None:
        """The key of a request; None becomes SQL's NULL, which equals nothing and so is never found."""
        return None if request_hash in self.cut else f"{self.depends_on()}/{request_hash}"
