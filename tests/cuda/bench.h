/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVS_TEST_CUDA_BENCH_H
#define KVS_TEST_CUDA_BENCH_H

/*
 * Print what the copy kernel, 2-D copies and one copy per run take for real shapes, against one copy of the same bytes;
 * one JSON object a line after a table. tokens: of the longer prompt; a quarter of it is the shorter one. 0: all went
 * through.
 */
int bench_main(unsigned tokens);

#endif
