# SPDX-License-Identifier: Apache-2.0
"""Real SGLang servers on CPUs: tiny models, server pairs, requests."""
