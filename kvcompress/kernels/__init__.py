"""Kernels by operation; in each folder `naive.py` is the plain torch truth beside its fast twins for CPU and CUDA."""
