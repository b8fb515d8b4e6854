"""Kernels run on the GPU where there is one, and in Triton's interpreter, on small shapes, where
none is.

Import this before Triton, which Transformers imports.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
