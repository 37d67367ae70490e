"""What a method sees of one layer when it decides what stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcompress.budget import Budget, resolve
from kvcompress.kernels import choose
from kvcompress.kernels.scores.naive import column_sums
from kvcompress.kernels.softmax import Softmax
from kvcompress.methods.base import Ends, Kept
from kvcompress.stores.holes import weakest_units
from kvcompress.stores.slots import column, ends_mask
from kvcompress.stores.store import Store


@dataclass
class RecentQueries:
    """The last queries of a prompt [B, H, G, W, D] (rotary applied) and how the model attends with them."""

    queries: Tensor
    real: list[int]  # of the W columns, how many at the end are tokens of this prompt, per row
    softmax: Softmax

    def behind(self, before: RecentQueries | None, window: int) -> RecentQueries:
        """The last `window` queries of each row, out of these and those of the prompt's calls `before`."""
        new = self.queries.shape[3]
        real = [min(count, new) for count in self.real]
        if before is None:
            return replace(self, real=real)
        old = before.queries.shape[3]
        both = torch.cat([before.queries, self.queries], 3)
        if real.count(new) != len(real):  # padding must not come to lie between a row's queries
            back = torch.arange(old + new - 1, -1, -1, device=both.device)
            mine = column(real, both.device)
            index = torch.where(back < mine, old + new - 1 - back, old + mine - 1 - back).clamp(min=0)
            both = both.gather(3, index[:, None, None, :, None].expand_as(both))
        real = [min(window, count + own) for count, own in zip(before.real, real, strict=True)]
        return replace(self, queries=both[..., -window:, :], real=real)


@dataclass
class LayerView:
    """One layer after its attention, before anything is evicted. B rows, H KV heads, S slots."""

    store: Store
    prompt_lengths: list[int]
    tokens_within: Callable[[int], int]
    recent: RecentQueries | None = None
    give_up: list[int] | None = None  # of each row, how many packed units have to go with all that they hold
    decoding: bool = False  # whether no prompt is being fed

    @property
    def lengths(self) -> list[int]:
        """Slots in use, per row."""
        return self.store.lengths

    @property
    def device(self) -> torch.device:
        return self.store.device

    @property
    def scores(self) -> Tensor:
        """Running sum of every key's softmax column over all queries so far: fp32 [B, H, S]."""
        if self.store.scores is None:
            raise ValueError("this method did not ask for scores; set needs_scores = True in its class")
        return self.store.scores.view

    @property
    def keys(self) -> Tensor:
        """The stored keys [B, H, S, D], rotary applied; packed ones as they are attended to, holes hold anything."""
        return self.store.whole(0)

    @property
    def values(self) -> Tensor:
        """The stored values [B, H, S, D]; packed ones as they are attended to, holes hold anything."""
        return self.store.whole(1)

    def tokens(self, budget: Budget) -> list[int]:
        """How many tokens `budget` means for each row."""
        return resolve(budget, self.prompt_lengths, self.tokens_within)

    def last(self, counts: list[int]) -> Tensor:
        """The newest `counts[b]` tokens of each row: bool [B, H or 1, S]."""
        if not self.store.has_gaps:
            return ends_mask(self.lengths, [0] * len(counts), counts, self.device)
        alive = self.store.current_positions(self.device) >= 0
        from_end = alive.flip(-1).long().cumsum(-1).flip(-1)
        return alive & (from_end <= column(counts, self.device)[:, None])

    def ends(self, first: list[int], last: list[int]) -> Ends:
        """The decision to keep the first and the last slots of each row."""
        return Ends(first, last)

    def attention_of_last(self, window: int) -> Tensor:
        """Softmax of the prompt's last `window` queries over all keys, summed over them: fp32 [B, H, S].

        Averaged over the query heads of each KV head. Causal inside the window; a row with fewer tokens in this
        prompt looks from those it has.
        """
        if self.recent is None:
            raise ValueError("no queries were kept; a method that looks from the last queries sets query_window")
        recent = self.recent
        queries = recent.queries[..., -window:, :]
        plain = self.store.plain()
        if plain is not None and not self.store.has_gaps:
            real = [min(count, queries.shape[3]) for count in recent.real]
            fast = choose.window_votes(queries, plain[0], self.lengths, real, recent.softmax)
            if fast is not None:
                return fast
        mask = self._window_mask(queries.shape[3], recent.real)
        return column_sums(queries, self.store, lambda start, stop: mask[:, :, start:stop], recent.softmax)

    def _window_mask(self, columns: int, real: list[int]) -> Tensor:
        """What the last `columns` queries see, of which the last `real[b]` are tokens of row b: [B, H or 1, T, S]."""
        device = self.device
        ends, tokens = column(self.lengths, device)[:, None], column(real, device)[:, None]
        back = torch.arange(columns - 1, -1, -1, device=device)[:, None]
        seen = ((torch.arange(self.store.length, device=device) < ends - back) & (back < tokens))[:, None]
        alive = self.store.alive(device)
        return seen if alive is None else seen & alive[:, :, None]

    def over_neighbours(self, votes: Tensor, pool: Callable[[Tensor], Tensor]) -> Tensor:
        """`pool` along the tokens of votes [B, H, S], as if the holes that a packing partner leaves were not there."""
        if not self.store.has_gaps:
            return pool(votes)
        alive = (self.store.current_positions(self.device) >= 0).expand_as(votes)
        order = (~alive).to(torch.uint8).argsort(dim=-1, stable=True)
        pooled = pool(votes.masked_fill(~alive, 0).gather(-1, order))
        return torch.zeros_like(votes).scatter(-1, order, pooled)

    def top_beside_newest(self, votes: Tensor, counts: list[int], newest: list[int]) -> Kept:
        """What `top` chooses beside the `newest[b]` last tokens of each row, without asking a GPU how many that are."""
        mask = self.top(votes, counts, always=self.last(newest))
        if self.store.has_gaps or self.give_up is not None:
            return Kept(mask, None)
        rows = zip(counts, newest, self.lengths, strict=True)
        return Kept(mask, [min(max(count, last), length) for count, last, length in rows])

    def top(self, votes: Tensor, counts: list[int], always: Tensor | None = None) -> Tensor:
        """The slots in `always` and those with the highest votes beside them, `counts[b]` in all: bool [B, H, S].

        Ties go to the lowest slot. Where holes take more than a budget in bytes has room for, the packed units whose
        best token has the lowest vote go as a whole. Raises ValueError if a vote is NaN (while decoding, on a CPU only:
        asking would stop a GPU's stream).
        """
        if (votes.device.type == "cpu" or not self.decoding) and bool(votes.isnan().any()):
            raise ValueError(
                "a score is NaN, so no token can be chosen: the keys, values or weights hold NaN. "
                "Check the model's dtype (float16 overflows in some models; bfloat16 or float32 do not)"
            )
        if always is None:
            always = torch.zeros_like(votes, dtype=torch.bool)
        alive = self.store.alive(votes.device)
        if alive is not None:
            always, closed = always & alive, always | ~alive
        else:
            closed = always
        if self.give_up is not None:
            worth = votes.masked_fill(closed & ~always, -torch.inf).masked_fill(always, torch.inf)
            weakest = weakest_units(self.store, worth, self.give_up)
            always, closed = always & ~weakest, closed | weakest
        ranked = votes.masked_fill(closed, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
        wanted = column(counts, votes.device) - always.sum(-1)
        chosen = torch.minimum(wanted.clamp(min=0), (~closed).sum(-1))
        best = torch.arange(votes.shape[2], device=votes.device) < chosen[..., None]
        picked = torch.zeros_like(votes, dtype=torch.bool).scatter(2, ranked, best.expand_as(votes))
        return picked | always
