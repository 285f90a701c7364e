/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVS_TEST_CUDA_BENCH_H
#define KVS_TEST_CUDA_BENCH_H

/*
 * Print what the copy kernel, 2-D copies and one copy per run take for what goes from one prefill rank to one decode
 * rank in a request of real models, against one copy of the same bytes: JSON, one object a line, the first about the
 * driver. tokens: of the longer prompt; a quarter of it is the shorter one. scripts/bench-gpu makes a table of it. 0:
 * all went through.
 */
int bench_main(unsigned tokens);

#endif
