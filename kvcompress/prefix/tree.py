"""The prompts of a trace as one tree: what they share is written once."""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

from rich.text import Text
from rich.tree import Tree

from kvcompress.prefix.requests import Trace


@dataclass
class Node:
    """A run of prompt that no request leaves half-way, except to end there.

    `label`: what the run holds. `tokens`: its length. `requests`: prompts that go through its first block or segment.
    `ended`: of these, the ones that end inside the run.
    """

    label: str
    tokens: int
    requests: int
    ended: int
    children: list["Node"] = field(default_factory=list)
    left_out: int = 0  # children that `busiest` dropped


def prompt_tree(trace: Trace) -> list[Node]:
    """The tree's roots, chains of single children merged, children in the order of first sight.

    Nodes are made of segments where the trace labels them, of blocks otherwise; the tails of prompts that fill no
    block are then not part of the tree.
    """
    table = trace.positions if trace.labelled else trace.blocks
    size = len(table)
    ended = [0] * size
    for request in trace.requests:
        path = request.positions if trace.labelled else request.blocks
        if path:
            ended[path[-1]] += 1
    requests, first, more = ended.copy(), [-1] * size, {}
    for i in range(size - 1, -1, -1):  # a child's number is greater than its parent's
        above = table.parent[i]
        if above >= 0 and requests[i]:
            requests[above] += requests[i]
            if first[above] >= 0:
                more.setdefault(above, []).append(first[above])
            first[above] = i
    roots: list[Node] = []
    waiting = [(i, roots) for i in range(size - 1, -1, -1) if table.parent[i] < 0 and requests[i]]
    while waiting:
        top, siblings = waiting.pop()
        chain = [top]
        while first[chain[-1]] >= 0 and chain[-1] not in more:
            chain.append(first[chain[-1]])
        start = table.end[table.parent[top]] if table.parent[top] >= 0 else 0
        node = Node(
            label=_label([table.label[i] for i in chain], trace.labelled),
            tokens=table.end[chain[-1]] - start,
            requests=requests[top],
            ended=sum(ended[i] for i in chain),
        )
        siblings.append(node)
        below = chain[-1]
        if below in more:
            waiting += [(child, node.children) for child in more[below] + [first[below]]]
    return roots


def busiest(roots: list[Node], nodes: int) -> Node:
    """A copy with only the `nodes` nodes that most requests go through, under one unlabelled node at the top."""
    top = Node("", 0, sum(root.requests for root in roots), 0)
    order = count()  # ties go to the node seen first
    waiting = [(-root.requests, next(order), root, top) for root in roots]
    heapify(waiting)
    while waiting and nodes > 0:
        nodes -= 1
        _, _, node, above = heappop(waiting)
        copy = Node(node.label, node.tokens, node.requests, node.ended)
        above.children.append(copy)
        for child in node.children:
            heappush(waiting, (-child.requests, next(order), child, copy))
    for _, _, _, above in waiting:
        above.left_out += 1
    return top


def render_tree(top: Node, title: str) -> Tree:
    """The tree that `busiest` gives, for rich to print."""
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


def _label(labels: list[str], labelled: bool) -> str:
    if not labelled:
        return f"{len(labels):,} block{'s' if len(labels) > 1 else ''}"
    if len(labels) <= 3:
        return " + ".join(labels)
    return f"{labels[0]} … {labels[-1]}"
