"""The prompts of a trace as one tree: what they share is written once."""

from array import array
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np
from rich.text import Text
from rich.tree import Tree

from kvcompress.prefix.requests import Trace


@dataclass
class Node:
    """A run of prompt that no request leaves half-way, except to end there.

    `label`: what the run holds. `tokens`: its length. `requests`: prompts that go through its first block or segment.
    `ended`: of these, the ones that end inside the run. `left_out`: children beyond the number asked for.
    """

    label: str
    tokens: int
    requests: int
    ended: int
    children: list["Node"] = field(default_factory=list)
    left_out: int = 0


def prompt_tree(trace: Trace, nodes: int) -> Node:
    """The prompts as a tree under one empty node, chains of single children merged.

    Of a large tree only the `nodes` nodes that most requests go through are made. They are made of segments where the
    trace labels them, of blocks otherwise; the tails of prompts that fill no block are then not part of the tree.
    """
    table = trace.positions if trace.labelled else trace.blocks
    requests, ended = array("i", [0]) * len(table), array("i", [0]) * len(table)
    for request in trace.requests:
        path = request.positions if trace.labelled else request.blocks
        if path:
            ended[path[-1]] += 1
            requests[path[-1]] += 1
    for i in range(len(table) - 1, -1, -1):  # a child's number is greater than its parent's
        if table.parent[i] >= 0:
            requests[table.parent[i]] += requests[i]
    children = _Children(table.parent, requests)
    top = Node("", 0, len(trace.requests), 0)
    order = count()  # of nodes with as many requests, the one seen first comes first
    waiting = [(-requests[i], next(order), i, top) for i in children.of(-1)]
    waiting.sort()
    while waiting and nodes > 0:
        nodes -= 1
        _, _, first, above = heappop(waiting)
        chain = [first]
        while len(below := children.of(chain[-1])) == 1:
            chain += below
        start = table.end[table.parent[first]] if table.parent[first] >= 0 else 0
        node = Node(
            label=_label(chain, table.label if trace.labelled else None),
            tokens=table.end[chain[-1]] - start,
            requests=requests[first],
            ended=sum(ended[i] for i in chain),
        )
        above.children.append(node)
        for i in below:
            heappush(waiting, (-requests[i], next(order), i, node))
    for _, _, _, above in waiting:
        above.left_out += 1
    return top


def render_tree(top: Node, title: str) -> Tree:
    """What `prompt_tree` gives, for rich to print."""
    drawn = Tree(Text(title))
    waiting = [(top, drawn)]
    while waiting:
        node, branch = waiting.pop()
        for child in node.children:
            line = Text.assemble((child.label, "bold"), f"  {child.tokens:,} tokens, {child.requests:,} requests")
            if child.ended:
                line.append(f", {child.ended:,} end here")
            waiting.append((child, branch.add(line)))
        if node.left_out:
            branch.add(Text(f"… {node.left_out:,} more", style="dim"))
    return drawn


class _Children:
    """The children of every node that some request goes through, in the order of first sight."""

    def __init__(self, parent: array, requests: array) -> None:
        parents = np.array(parent, dtype=np.int32)
        # nodes of requests that were left out belong to no one
        parents[np.frombuffer(requests, dtype=np.int32) == 0] = len(parent)
        self._order = np.argsort(parents, kind="stable")
        self._parents = parents[self._order]

    def of(self, node: int) -> list[int]:
        """The children of `node`, -1 for the tree's roots."""
        first, last = np.searchsorted(self._parents, (node, node + 1))
        return self._order[first:last].tolist()


def _label(chain: list[int], labels: dict[int, str] | None) -> str:
    if labels is None:
        return f"{len(chain):,} block{'s' if len(chain) > 1 else ''}"
    if len(chain) <= 3:
        return " + ".join(labels[i] for i in chain)
    return f"{labels[chain[0]]} … {labels[chain[-1]]}"
