import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompress.evals import FAMILIES, Sample, make_samples, split_prompt
from kvcompress.evals.generate.draft import Setting, largest_fitting
from kvcompress.evals.haystack import load_haystack
from tests.evals.tiny import SENTENCE_BYTES, byte_level, trained

NUMBER = re.compile(r" ?(?:The|One) secret number of (\S+) is (\d{7})\.")
DEPTHS = st.floats(0, 1)
SEEDS = st.integers(0, 10**9)
LENGTHS = st.integers(1600, 6000)


def one(family: str, haystack: str, length: int, depth: float, seed: int, **options: Any) -> Sample:
    """The first sample of a family, its length in bytes."""
    made = make_samples(
        family, byte_level(), length=length, samples=1, seed=seed, haystack=haystack, depths=[depth], **options
    )
    return made[0]


def body(sample: Sample) -> str:
    """The context without its introduction."""
    return sample.context.split("\n\n")[1]


def assert_depth(text: str, needle: re.Pattern[str], hit: int, depth: float) -> None:
    """The needle that begins at ``hit`` has ``depth`` of the other text before it, to within a sentence."""
    hay = len(needle.sub("", text).strip())
    before = len(needle.sub("", text[:hit]).strip())
    assert abs(before - depth * hay) <= SENTENCE_BYTES


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15)
@given(length=LENGTHS, depth=DEPTHS, seed=SEEDS)
def test_the_length_is_never_exceeded_and_missed_by_less_than_one_unit(
    family: str, haystack_file: str, length: int, depth: float, seed: int
) -> None:
    sample = one(family, haystack_file, length, depth, seed)
    assert sample.length == len(sample.prompt.encode()) <= length == sample.target_length
    largest_unit = {"kv_retrieval": len(',\n"": ""') + 2 * 36, "common_words": len(", ") + 9}
    assert length - sample.length <= largest_unit.get(family, SENTENCE_BYTES)
    # What is kept for the answer is missing to the prompt, and to nothing else of the sample.
    kept = one(family, haystack_file, length + 77, depth, seed, answer_tokens=77)
    assert kept == replace(sample, target_length=length + 77)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8)
@given(length=st.integers(700, 3000), depth=DEPTHS, seed=SEEDS)
def test_one_more_unit_is_too_long_where_tokens_do_not_add_up(
    family: str, haystack_file: str, length: int, depth: float, seed: int
) -> None:
    tokenizer = trained()
    setting = Setting(load_haystack(haystack_file), tokenizer, length)
    draft = FAMILIES[family].draw(Random(seed), setting, depth)
    units, tokens = largest_fitting(draft, setting)
    assert tokens == len(tokenizer(draft.prompt(units)).input_ids) <= length
    assert len(tokenizer(draft.prompt(units + 1)).input_ids) > length


@given(LENGTHS, DEPTHS, SEEDS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_needles_are_in_the_text_once_and_the_first_answer_at_its_depth(
    haystack_file: str, length: int, depth: float, seed: int, keys: int, values: int, queries: int
) -> None:
    queries = min(queries, keys)
    sample = one("needle", haystack_file, length, depth, seed, keys=keys, values=values, queries=queries)
    text = body(sample)
    found = [(match[1], match[2]) for match in NUMBER.finditer(text)]
    assert len({number for _, number in found}) == len(found) == keys * values
    assert len({key for key, _ in found}) == keys
    asked = [key for key in {key for key, _ in found} if key in sample.question]
    assert len(asked) == queries
    assert sorted(sample.answers) == sorted(number for key, number in found if key in asked)
    hit = next(match.start() for match in NUMBER.finditer(text) if match[2] == sample.answers[0])
    assert_depth(text, NUMBER, hit, depth)
    assert sample.context.count(sample.answers[0]) == 1


@given(LENGTHS, DEPTHS, SEEDS)
def test_two_turns_ask_for_different_numbers_far_apart(
    haystack_file: str, length: int, depth: float, seed: int
) -> None:
    sample = one("two_turn", haystack_file, length, depth, seed)
    text = body(sample)
    found = {match[1]: match for match in NUMBER.finditer(text)}
    first = re.findall(r"number of (\S+) in", sample.first_question)
    both = re.findall(r"number of (\S+) in", sample.question)
    assert len(first) == 1 and both[0] == first[0] != both[1]
    assert found[both[0]][2] in sample.question
    assert sample.answers == [found[both[1]][2]]
    assert sample.answers[0] not in sample.question + sample.answer_prefix
    assert_depth(text, NUMBER, found[both[1]].start(), depth)
    hay = len(NUMBER.sub("", text))
    places = [len(NUMBER.sub("", text[: found[key].start()])) / hay for key in both]
    assert abs(places[0] - places[1]) > 0.25 - 2 * SENTENCE_BYTES / hay


@given(LENGTHS, DEPTHS, SEEDS)
def test_kv_retrieval_is_json_with_the_answer_under_the_key_asked_for(
    haystack_file: str, length: int, depth: float, seed: int
) -> None:
    sample = one("kv_retrieval", haystack_file, length, depth, seed)
    pairs: dict[str, str] = json.loads(body(sample))
    (key,) = re.findall(r'the key "([0-9a-f-]{36})"', sample.question)
    assert sample.answers == [pairs[key]]
    assert list(pairs).index(key) == round(depth * (len(pairs) - 1))
    assert len({*pairs, *pairs.values()}) == 2 * len(pairs)
    assert all(re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", u) for u in pairs)


@given(LENGTHS, DEPTHS, SEEDS, st.integers(1, 3), st.integers(0, 5))
def test_running_the_assignments_gives_the_variables_asked_for(
    haystack_file: str, length: int, depth: float, seed: int, chains: int, hops: int
) -> None:
    sample = one("variable_tracking", haystack_file, length, depth, seed, chains=chains, hops=hops)
    statement = re.compile(r" ?SET (\w+) = (\w+)\.")
    state: dict[str, str] = {}
    for match in statement.finditer(sample.context):
        name, source = match.groups()
        assert name not in state
        state[name] = source if source.isdigit() else state[source]
    (value,) = re.findall(r"hold (\d{5}),", sample.question)
    assert sample.answers == [name for name, held in state.items() if held == value]
    assert len(state) == chains * (hops + 1) and len(set(state.values())) == chains
    hit = next(m.start() for m in statement.finditer(body(sample)) if m[2] == value)
    assert_depth(body(sample), statement, hit, depth)


@given(LENGTHS, SEEDS, st.integers(1, 10))
def test_common_words_are_the_most_common_ones(haystack_file: str, length: int, seed: int, words: int) -> None:
    sample = one("common_words", haystack_file, length, 0.5, seed, words=words)
    counts = Counter(body(sample).split(", ")).most_common()
    assert {word for word, _ in counts[:words]} == set(sample.answers)
    assert counts[words - 1][1] >= counts[words][1] + 2
    assert sample.depth is None
    assert not any(answer in word for answer in sample.answers for word, _ in counts if word != answer)


@given(LENGTHS, DEPTHS, SEEDS)
def test_the_passkey_is_said_twice_at_its_depth(haystack_file: str, length: int, depth: float, seed: int) -> None:
    sample = one("passkey", haystack_file, length, depth, seed)
    hidden = re.compile(r" ?The pass key is (\d{5})\. Keep it in mind: \1 is the pass key\.")
    (match,) = hidden.finditer(body(sample))
    assert sample.answers == [match[1]]
    assert sample.prompt.count(match[1]) == 2
    assert_depth(body(sample), hidden, match.start(), depth)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_forms_have_the_same_prompts_cut_before_or_behind_the_question(family: str, haystack_file: str) -> None:
    forms = [
        make_samples(family, byte_level(), length=2000, samples=3, haystack=haystack_file, query_aware=aware)
        for aware in (True, False)
    ]
    for aware, agnostic in zip(*forms, strict=True):
        assert aware.prompt == agnostic.prompt
        assert (aware.query_aware, agnostic.query_aware) == (True, False)
        question = agnostic.first_question or agnostic.question
        for wrap in ("{}", "<user>{}<assistant>"):
            compressed, after = split_prompt(wrap.format(agnostic.prompt), agnostic.to_doc())
            assert compressed + after == wrap.format(agnostic.prompt)
            assert compressed == wrap.format(agnostic.context + "|").split("|")[0]
            assert question.strip() not in compressed
            compressed, after = split_prompt(wrap.format(aware.prompt), aware.to_doc())
            assert compressed + after == wrap.format(aware.prompt)
            assert compressed.endswith(question)
            assert after.startswith(aware.question[len(question) :] + aware.answer_prefix)


def test_a_prompt_in_a_chat_template_is_cut_at_the_stripped_question(haystack_file: str) -> None:
    (sample,) = make_samples("needle", byte_level(), length=1500, samples=1, haystack=haystack_file)
    message = (sample.context + sample.question).strip()
    prompt = f"<user>{message}<end><assistant>{sample.answer_prefix}"
    assert split_prompt(prompt, sample.to_doc()) == (f"<user>{message}", f"<end><assistant>{sample.answer_prefix}")


def test_documents_of_other_tasks_are_compressed_whole() -> None:
    assert split_prompt("Question: why?\nAnswer:", {"query": "why?"}) == ("Question: why?\nAnswer:", "")


def test_a_truncated_prompt_without_its_question_is_refused(haystack_file: str) -> None:
    (sample,) = make_samples("needle", byte_level(), length=1500, samples=1, haystack=haystack_file)
    with pytest.raises(ValueError, match="does not stand in the prompt"):
        split_prompt(sample.context, sample.to_doc())


def test_another_length_hides_the_same_needles(haystack_file: str) -> None:
    short, long = (
        make_samples("needle", byte_level(), length=length, samples=4, haystack=haystack_file, keys=3)
        for length in (1500, 5000)
    )
    for i in range(4):
        assert {m.groups() for m in NUMBER.finditer(short[i].context)} == {
            m.groups() for m in NUMBER.finditer(long[i].context)
        }
        assert short[i].question == long[i].question


def test_the_first_samples_cover_all_depths_and_more_samples_change_none(haystack_file: str) -> None:
    few, many = (
        make_samples("needle", byte_level(), length=1500, samples=count, haystack=haystack_file) for count in (11, 15)
    )
    assert [sample.depth for sample in few] == [i / 10 for i in range(11)]
    assert many[:11] == few


def test_samples_are_bitwise_the_same_on_every_machine(haystack_file: str) -> None:
    made = [
        {**sample.to_doc(), "haystack": None}
        for family in FAMILIES
        for sample in make_samples(family, byte_level(), length=2500, samples=3, haystack=haystack_file)
    ]
    digest = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()
    # Each run of the tests has another PYTHONHASHSEED. If the samples change on purpose, so must metadata.version.
    assert digest == "f85033bfe3b6742ab7fac40dff4bd6509c8fe436218f3f7bed808f89d002b620"


@pytest.mark.parametrize(
    ("family", "asked", "message"),
    [
        ("needel", {}, r"unknown task family 'needel'; did you mean 'needle'\?; one of needle, kv_retrieval"),
        ("needle", {"key": 2}, r"needle has no option 'key'; did you mean 'keys'\?; its options: keys, values"),
        ("passkey", {"keys": 2}, "passkey has no option 'keys'; its options: none"),
        ("needle", {"keys": 1, "queries": 2}, r"keys=1, values=1, queries=2\): expected 1 <= queries <= keys"),
        ("two_turn", {"keys": 1}, r"two_turn\(keys=1\): expected at least 2"),
        ("variable_tracking", {"chains": 0}, r"chains=0, hops=4\): expected chains >= 1"),
        ("common_words", {"words": 0}, r"common_words\(words=0\): expected at least 1"),
        ("common_words", {"haystack": "filler"}, "'filler' has .* ask for fewer or use a longer text"),
        ("needle", {"depths": [0.5, 1.5]}, r"depths=\[0.5, 1.5\]: expected at least one, each a fraction from 0 to 1"),
        ("needle", {"depths": []}, r"depths=\[\]: expected at least one"),
        ("needle", {"depths": 0.5}, r"depths=0.5: expected at least one, each a fraction from 0 to 1"),
        ("needle", {"depths": ["0.5"]}, r"depths=\['0.5'\]: expected at least one"),
        ("needle", {"keys": "4"}, "keys='4': expected a whole number"),
        ("needle", {"samples": 0}, "samples=0: expected a whole number of at least 1"),
        ("needle", {"length": 0.5}, "length=0.5: expected a whole number"),
        ("needle", {"answer_tokens": 4000}, "answer_tokens=4000: expected 0 or more, and less than length=4000"),
        ("needle", {"apply_chat_template": True}, "the tokenizer has no chat template"),
        ("needle", {"length": 64, "answer_tokens": 9}, "tokens, of which 9 are kept for the answer is too short"),
        ("needle", {"length": 64}, r"length=64 tokens is too short: the shortest prompt of this task has \d+"),
    ],
)
def test_mistakes_are_named(family: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_samples(family, byte_level(), **{"length": 4000, "samples": 1, **asked})


def test_the_shortest_length_named_by_the_error_works(haystack_file: str) -> None:
    with pytest.raises(ValueError, match="too short") as refusal:
        make_samples("needle", byte_level(), length=64, samples=1, haystack=haystack_file)
    shortest = int(re.findall(r"has (\d+)", str(refusal.value))[0])
    (sample,) = make_samples("needle", byte_level(), length=shortest, samples=1, haystack=haystack_file)
    assert sample.length == shortest
