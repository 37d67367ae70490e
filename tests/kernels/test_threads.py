"""Kernels called from several Python threads at once, in forked processes, without a cache folder, without Numba."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvcompress.kernels import choose
from kvcompress.kernels.softmax import Softmax
from tests.kernels.layers import packed

pytest.importorskip("numba", reason="the CPU kernels need Numba (kvcompress[cpu])")

from numba.core import caching

from kvcompress.kernels.jit import threads
from kvcompress.kernels.jit.call import Call
from kvcompress.kernels.jit.compile import Parameters, compile_kernel
from kvcompress.kernels.jit.values import RUNS_HERE

pytestmark = pytest.mark.skipif(not RUNS_HERE, reason="this processor lacks vectors, FMA or fp16 conversion")


def in_a_process(code: str) -> None:
    """Runs code in a Python of its own, in the repository's root."""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[2])


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch, and with it the kernels, on two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("openmp", [True, False], ids=["torch's threads", "Python's threads"])
@pytest.mark.usefixtures("two_threads")
def test_calls_at_the_same_time(openmp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not openmp:
        monkeypatch.setattr(threads, "torch_openmp", lambda: None)
    torch.manual_seed(0)
    case = packed([(0, 1024, 1000, 1100)], 2, 3, 1, 64, 2)

    def attend(_: int) -> torch.Tensor | None:
        return choose.attend_decode(case.query, [case.layer], None, Softmax(0.125))

    right = attend(0)
    assert right is not None
    with ThreadPoolExecutor(4) as pool:
        assert all(got is not None and torch.equal(got, right) for got in pool.map(attend, range(60)))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only on Linux torch brings a library that has it")
def test_torchs_own_threads_are_found_on_linux() -> None:
    if not torch.backends.openmp.is_available():
        pytest.skip("this torch was built without OpenMP")
    assert threads.torch_openmp() is not None


def double(p: Parameters) -> None:
    with p.code.tasks(p.next_task, p.tasks) as task:
        place = p.numbers + task * 8
        p.code.store(place, p.code.load(place, task.ir.type) * 2)


@pytest.mark.usefixtures("two_threads")
def test_each_task_is_done_once() -> None:
    kernel = compile_kernel("double", double, ["next_task", "tasks", "numbers"])
    numbers = torch.arange(10_000)
    call = Call(["next_task", "tasks", "numbers"], {"tasks": 10_000, "numbers": numbers.data_ptr()}, next_task=[0])
    kernel.run(call.address, 10_000)
    assert torch.equal(numbers, 2 * torch.arange(10_000))


def test_no_folder_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    kernel = compile_kernel("double, not kept", double, ["next_task", "tasks", "numbers"])
    numbers = torch.tensor([3, 4])
    call = Call(["next_task", "tasks", "numbers"], {"tasks": 2, "numbers": numbers.data_ptr()}, next_task=[0])
    kernel.run(call.address, 1)
    assert numbers.tolist() == [6, 8]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_forked_process_with_one_thread() -> None:
    code = """
import os, torch
from kvcompress.kernels import choose
from kvcompress.kernels.softmax import Softmax
from tests.kernels.layers import packed
case = packed([(0, 1024, 1000, 1100)], 1, 3, 1, 64, 2)
right = choose.attend_decode(case.query, [case.layer], None, Softmax(0.125))
torch.set_num_threads(1)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(choose.attend_decode(case.query, [case.layer], None, Softmax(0.125)), right) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    in_a_process(code)


def test_without_numba_the_reference_is_left_to_do_it() -> None:
    code = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
from kvcompress.kernels import choose
from kvcompress.kernels.softmax import Softmax
from tests.kernels.layers import packed, pack_values
case = packed([(0, 1024, 1000, 1100)], 1, 3, 1, 64, 2)
assert choose.attend_decode(case.query, [case.layer], None, Softmax(0.125)) is None
assert choose.column_sums(case.query, case.layer.tail_keys, 0, Softmax(0.125)) is None
assert not choose.quantise_and_pack(case.layer.tail_values, case.layer.values, 0)
assert not choose.evict_in_place(case.layer.tail_values, None, 0)
"""
    in_a_process(code)


def test_importing_the_package_does_not_import_numba() -> None:
    code = "import sys, kvcompress; assert not {'numba', 'triton.language'} & set(sys.modules)"
    in_a_process(code)
