# SPDX-License-Identifier: Apache-2.0
"""Python imports this module at start, from whatever folder of PYTHONPATH has it first."""
import gc

import cpu_fixups

# Importing SGLang makes millions of objects that stay: collecting after every 700 takes a quarter of a server's start.
gc.set_threshold(100_000, 50, 50)
cpu_fixups.install()
