# SPDX-License-Identifier: Apache-2.0
"""SGLang up to 0.5.12 imports the host cache kernels from this submodule."""
from sgl_kernel import __getattr__  # noqa: F401  (a module-level __getattr__ is looked up in each module)
