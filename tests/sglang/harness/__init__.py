# SPDX-License-Identifier: Apache-2.0
"""SGLang's own transfer managers without a model: one process per rank, on memory of the CPU, checked byte by byte."""
