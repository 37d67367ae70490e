"""lm-eval knows the model as soon as the package is imported, in a process of its own."""

import subprocess
import sys

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")

CODE = """
import sys
import kvcompress.evals
from lm_eval.api.registry import model_registry
print("kvcompress" in model_registry, "hf" in model_registry, "torch" in sys.modules)
"""
"""The model itself, and with it torch, is loaded when it is asked for."""


def test_importing_the_package_makes_the_model_known_beside_those_of_lm_eval() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout == "True True False\n", done.stderr
