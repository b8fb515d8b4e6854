"""Kernels run on the GPU where there is one, and in Triton's interpreter, on small shapes, where there is none."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, which Transformers does
