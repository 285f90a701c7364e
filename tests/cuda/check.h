/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A test program's frame that needs nothing but the C library, as these tests also run on a bare machine with a GPU.
 * Each case runs in a process of its own.
 */
#ifndef KVS_TEST_CUDA_CHECK_H
#define KVS_TEST_CUDA_CHECK_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

/* End the case as failed, with the place and a message, unless the condition holds. */
#define CHECK(condition, ...) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: %s:", __FILE__, __LINE__, #condition); \
			fprintf(stderr, " " __VA_ARGS__); \
			fputc('\n', stderr); \
			exit(1); \
		} \
	} while (0)

#define SKIPPED 77

/* End the case as skipped, with the reason. */
#define SKIP(...) \
	do { \
		printf("       skipped: "); \
		printf(__VA_ARGS__); \
		putchar('\n'); \
		fflush(stdout); \
		exit(SKIPPED); \
	} while (0)

struct test {
	const char *name;
	void (*run)(void);
};

extern const struct test memory_tests[], engine_tests[], transfer_tests[], failure_tests[], rdma_tests[];

#endif
