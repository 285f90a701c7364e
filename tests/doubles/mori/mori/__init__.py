# SPDX-License-Identifier: Apache-2.0
"""A double of mori's transfer engine; see ../README.md."""
