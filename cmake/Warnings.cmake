# SPDX-License-Identifier: Apache-2.0
# Warnings are errors; gcc and clang agree on these.
add_compile_options(
  -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wold-style-definition
  -Wpointer-arith -Wwrite-strings -Wvla -Wformat=2 -Wundef -Wimplicit-fallthrough
  -fno-strict-aliasing -fstack-protector-strong)
