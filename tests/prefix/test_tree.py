"""The prompt tree against the day's own prompts, and against counting prefixes."""

from io import StringIO
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvcompress.prefix.requests import Trace
from kvcompress.prefix.trace import read_trace
from kvcompress.prefix.tree import Node, prompt_tree, render_tree

DAY = read_trace(Path(__file__).parents[2] / "configs" / "traces" / "coding_day.yaml")
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=20)


def test_the_day_as_a_tree() -> None:
    def facts(node: Node) -> tuple:
        return node.label, node.tokens, node.requests, node.ended, [facts(child) for child in node.children]

    (opening,) = prompt_tree(DAY, 40).children
    assert facts(opening) == (
        "system+tools + CLAUDE.md",
        4100,
        30,
        0,
        [
            (
                "main turn 1 … main turn 7",
                6300,
                12,
                7,
                [
                    ("main turn 8B + main turn 9B + main turn 10B", 2700, 3, 3, []),
                    ("main turn 8 + main turn 9", 1800, 2, 2, []),
                ],
            ),
            ("day2 turn 1 … day2 turn 6", 4800, 6, 6, []),
            *((f"sub{i} task … sub{i} turn 3", 2200, 4, 4, []) for i in (1, 2, 3)),
        ],
    )


def walk(node: Node) -> list[Node]:
    return [node] + [below for child in node.children for below in walk(child)]


@given(PROMPTS)
def test_every_prompt_and_token_is_in_the_tree_once(prompts: list[list[int]]) -> None:
    trace = Trace("made", 1)
    for prompt in prompts:
        trace.add([(prompt, 1)], len(prompt))
    nodes = walk(prompt_tree(trace, 1000))
    prefixes = {tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))}
    assert sum(node.tokens for node in nodes) == len(prefixes)
    assert sum(node.ended for node in nodes) == len(prompts)
    for node in nodes[1:]:
        assert len(node.children) != 1
        assert node.requests == node.ended + sum(child.requests for child in node.children)


@given(PROMPTS, st.integers(0, 6))
def test_a_small_tree_keeps_the_busiest_nodes(prompts: list[list[int]], count: int) -> None:
    trace = Trace("made", 1)
    for prompt in prompts:
        trace.add([([tuple(prompt[: i + 1]) for i in range(len(prompt))], 1)], len(prompt))
    every = sorted((node.requests for node in walk(prompt_tree(trace, 1000))[1:]), reverse=True)
    small = walk(prompt_tree(trace, count))
    assert sorted((node.requests for node in small[1:]), reverse=True) == every[:count]
    assert (sum(node.left_out for node in small) > 0) == (len(every) > count)


def test_the_tree_is_printed_with_what_was_left_out() -> None:
    out = StringIO()
    Console(file=out, width=100).print(render_tree(prompt_tree(DAY, 3), "prompts"))
    lines = out.getvalue().splitlines()
    assert lines[0] == "prompts"
    assert "system+tools + CLAUDE.md  4,100 tokens, 30 requests" in lines[1]
    assert "main turn 1 … main turn 7  6,300 tokens, 12 requests, 7 end here" in lines[2]
    assert [line.split("… ")[-1] for line in lines if "more" in line] == ["2 more", "3 more"]
