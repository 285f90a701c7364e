# SPDX-License-Identifier: Apache-2.0
"""The cases of tests/sglang/run, one module for each kind of question."""
