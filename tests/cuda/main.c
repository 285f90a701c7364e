/* SPDX-License-Identifier: Apache-2.0 */
/* Runs the cases, all or those whose name begins with an argument: "N passed, N failed, N skipped". */
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "check.h"
#include "peer.h"

static const struct test *const suites[] = {memory_tests, engine_tests, transfer_tests, failure_tests, rdma_tests};

static int passed, failed, skipped;

static double seconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void run(const struct test *test)
{
	double began = seconds();
	int status = -1;
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		alarm(120);
		test->run();
		exit(0);
	}
	if (pid > 0)
		(void)waitpid(pid, &status, 0);
	bool good = WIFEXITED(status) && WEXITSTATUS(status) == 0;
	bool skip = WIFEXITED(status) && WEXITSTATUS(status) == SKIPPED;
	passed += good;
	skipped += skip;
	failed += !good && !skip;
	printf("  %s %s (%.2f s", good ? "ok  " : skip ? "WAIVED" : "FAIL", test->name, seconds() - began);
	if (WIFSIGNALED(status))
		printf(", signal %d", WTERMSIG(status));
	printf(")\n");
}

int main(int argc, char **argv)
{
	if (argc == 3 && strcmp(argv[1], "--prefill") == 0)
		return prefill_main(atoi(argv[2]));
	if (argc == 3 && strcmp(argv[1], "--bench") == 0)
		return bench_main((unsigned)atoi(argv[2]));
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (size_t s = 0; s < sizeof(suites) / sizeof(suites[0]); s++) {
		for (const struct test *test = suites[s]; test->name != NULL; test++) {
			bool chosen = argc == 1;
			for (int i = 1; i < argc; i++)
				chosen = chosen || strncmp(test->name, argv[i], strlen(argv[i])) == 0;
			if (chosen)
				run(test);
		}
	}
	printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
	return failed > 0 || passed == 0;
}
