"""The Triton kernels: on a GPU as they are, elsewhere on the CPU through Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvcompress.kernels import choose
from kvcompress.kernels.layout import PackedKeys, dense_range
from kvcompress.kernels.softmax import Softmax

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the GPU kernels need Triton (kvcompress[cuda], Linux)"
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, where the same checks run natively")
def test_all_in_the_interpreter() -> None:
    from tests.kernels.triton_checks import CHECKS

    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_checks"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(CHECKS)


def test_on_a_gpu_they_are_the_ones_that_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatch finds each of them, and a part of the package that is missing is not taken for a missing Triton."""
    chosen: list[str] = []
    find = choose.fast

    def on_cuda(device: str, operation: str, on: tuple[str, ...] = ("cpu", "cuda")) -> ModuleType | None:
        module = find("cuda", operation, on)
        if module is not None:
            chosen.append(module.__name__.removeprefix("kvcompress.kernels."))
        return module

    monkeypatch.setattr(choose, "fast", on_cuda)
    query, keys = torch.zeros(1, 1, 1, 1, 24), torch.zeros(1, 1, 40, 24)
    assert choose.most_columns(query.expand(1, 1, 16, 1, 24)) == 4
    # None of them has code for these, which they say before anything is launched.
    assert choose.attend_decode(query.double(), [dense_range(keys, keys, [40])], None, Softmax(1.0)) is None
    assert choose.column_sums(query.double(), keys.double(), 39, Softmax(1.0)) is None
    words = torch.zeros(1, 1, 2, 3, 32, dtype=torch.int16)
    scales = torch.zeros(1, 1, 40, 24, dtype=torch.float16)
    assert not choose.quantise_and_pack(keys.double(), PackedKeys(words, scales, scales, 2, 1), 0)
    assert chosen == ["attention.triton", "attention.triton", "scores.triton", "pack.triton"]
    with pytest.raises(ImportError, match="no_such_kernels"):
        find("cuda", "no_such_kernels")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the checks ran in the interpreter instead")
@pytest.mark.parametrize(
    "name",
    [
        "decode",
        "decode_with_front_mask_softcap_and_sinks",
        "decode_with_one_group_of_channels",
        "decode_of_16_bits",
        "decode_in_parts",
        "decode_of_ranges_that_follow_each_other",
        "packing_keys",
        "packing_values",
        "column_sums",
    ],
)
def test_on_the_gpu(name: str) -> None:
    from tests.kernels.triton_checks import CHECKS

    torch.manual_seed(0)
    CHECKS[name]("cuda")
