"""Key-value retrieval: one value out of a long JSON object of random identifiers."""

from random import Random
from uuid import UUID

from kvcompress.evals.generate.draft import Draft, Setting

INTRODUCTION = "Below is a JSON object. Its keys and values are random identifiers. A question about it comes after it."


def kv_retrieval(rng: Random, setting: Setting, depth: float) -> Draft:
    """Fill the context with pairs of UUIDs and ask for the value of one of them.

    The pair asked for has the index ``depth * (pairs - 1)``, rounded. After "Lost in the Middle"
    (arXiv 2307.03172, section 3), sized by tokens instead of by pairs and worded anew. The haystack is not used.
    """
    gold = identifier(rng), identifier(rng)
    others: list[tuple[str, str]] = []
    taken = set(gold)
    pairs_rng = Random(rng.getrandbits(64))

    def fresh() -> str:
        while (value := identifier(pairs_rng)) in taken:
            pass
        taken.add(value)
        return value

    def context(units: int) -> str:
        while len(others) < units - 1:
            others.append((fresh(), fresh()))
        place = round(depth * (units - 1))
        pairs = [*others[:place], gold, *others[place : units - 1]]
        body = ",\n".join(f'"{key}": "{value}"' for key, value in pairs)
        return f"{INTRODUCTION}\n\n{{{body}}}\n\n"

    return Draft(
        context=context,
        question=f'Question: Which value belongs to the key "{gold[0]}" in the JSON object above?\n',
        answer_prefix=f'The value of "{gold[0]}" is',
        answers=(gold[1],),
        depth=depth,
    )


def identifier(rng: Random) -> str:
    """A random UUID (version 4) from the generator, never from the operating system."""
    return str(UUID(int=rng.getrandbits(128), version=4))
