"""Real SGLang servers on CPUs: tiny models, server pairs, requests."""
