"""What every test runs under: no network, repeatable property tests, few threads."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcompress.models import ModelNotFound, load_model, load_tokenizer

settings.register_profile("local", deadline=None, max_examples=25)
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

if "OMP_NUM_THREADS" not in os.environ:
    # The tiny models of the suite run slower on many threads, and parallel workers share the cores.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, min(4, (os.cpu_count() or 1) // workers)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses the real model is marked `model`, so that `-m "not model"` leaves it out."""
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M in fp32 and its tokenizer; skips, saying why, where they were never fetched."""
    try:
        return load_model("smollm2-135m", device="cpu"), load_tokenizer("smollm2-135m")
    except ModelNotFound as missing:
        pytest.skip(str(missing))
