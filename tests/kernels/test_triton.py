"""The Triton kernels: on a GPU as they are, elsewhere on the CPU through Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the checks ran in the interpreter instead")
@pytest.mark.parametrize(
    "name",
    [
        "decode",
        "decode_with_front_mask_softcap_and_sinks",
        "decode_with_one_group_of_channels",
        "decode_of_16_bits",
        "decode_in_parts",
        "packing_keys",
        "packing_values",
        "column_sums",
    ],
)
def test_on_the_gpu(name: str) -> None:
    from tests.kernels.triton_checks import CHECKS

    torch.manual_seed(0)
    CHECKS[name]("cuda")
