"""The suite; small models take the ways that large ones take."""

import os

import torch

if not torch.cuda.is_available():
    # before any kernel is defined: they run on the CPU then
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tpplan.comm import products

products.WORTH = 0
