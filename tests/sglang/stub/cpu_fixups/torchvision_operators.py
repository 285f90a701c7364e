# SPDX-License-Identifier: Apache-2.0
"""torchvision's compiled extension, built for CUDA, does not load beside a CPU build of torch.

Its import then ends with "operator torchvision::nms does not exist". Nothing here calls the two operators that it wants,
so declaring them is enough.
"""
from __future__ import annotations


def _declare() -> None:
    import torch

    if torch.version.cuda is None:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}",
                                 "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


BEFORE = {"torchvision": _declare}
