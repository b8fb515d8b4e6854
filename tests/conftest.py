"""Kernels run on the GPU where there is one, and in Triton's interpreter, on small shapes, where there is none."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, which Transformers does

# How long an example takes says how busy the machine is.
settings.register_profile("tangram", deadline=None)
settings.load_profile("tangram")
