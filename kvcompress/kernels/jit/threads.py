"""Runs compiled kernels on several cores, in torch's own threads wherever they can be reached.

A second pool beside torch's would compete with it: after each of its operators torch's threads keep their cores busy
for a while, waiting for more. So a kernel is handed to the OpenMP library that torch itself has loaded; elsewhere
Python threads run it. Either way `torch.get_num_threads()` decides how many take part, and any number of Python
threads may call at once.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path

import torch


class Kernel:
    """Machine code `void kernel(void* parameters)`: each thread that calls it takes tasks until none are left."""

    def __init__(self, address: int, owner: object) -> None:
        self.address, self.owner = address, owner
        self.function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def run(self, parameters: int, tasks: int) -> None:
        """Calls the kernel with the address of its parameters and waits.

        It runs in as many threads as torch would use, at most one a task.
        """
        threads = thread_count(tasks)
        if threads == 1:
            self.function(parameters)
            return
        openmp = torch_openmp()
        if openmp is not None:
            openmp(self.address, parameters, threads, 0)
            return
        others = [python_threads().submit(self.function, parameters) for _ in range(threads - 1)]
        self.function(parameters)
        wait(others)


def thread_count(tasks: int) -> int:
    """How many threads `Kernel.run` uses for `tasks` tasks."""
    return max(1, min(torch.get_num_threads(), tasks))


@cache
def torch_openmp() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel` of the OpenMP library inside torch's folder (LLVM's and Intel's have it too), if there is one."""
    if not sys.platform.startswith("linux") or torch.__file__ is None:
        return None
    for path in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*")):
        try:
            function = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
        except (OSError, AttributeError):
            continue  # not loaded by this torch, or another interface
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None


@cache
def python_threads() -> ThreadPoolExecutor:
    """Threads for where torch's cannot be reached; a forked process makes its own."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=python_threads.cache_clear)
    return ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1), thread_name_prefix="kvcompress")
