/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/wait.h>
#include <unistd.h>

#define FAILED  1
#define SKIPPED 77

static struct tsan_test *tests;
static bool any_failed;

void tsan_test_add(struct tsan_test *test)
{
	test->next = tests;
	tests = test;
}

#pragma GCC diagnostic ignored "-Wformat-nonliteral"
void tsan_check(const char *file, int line, const char *expression, bool die, bool ok, ...)
{
	if (ok)
		return;
	va_list args;
	va_start(args, ok);
	const char *format = va_arg(args, const char *);
	(void)fprintf(stderr, "%s:%d: %.200s: ", file, line, expression);
	if (format != NULL)
		(void)vfprintf(stderr, format, args);
	(void)fputc('\n', stderr);
	va_end(args);
	any_failed = true;
	if (die)
		exit(FAILED);
}

void tsan_skip(void)
{
	exit(SKIPPED);
}

static void run(const struct tsan_test *test)
{
	const struct tsan_test *suite = tests;
	while (suite != NULL && (!suite->is_suite || strcmp(suite->suite, test->suite) != 0))
		suite = suite->next;
	if (suite != NULL && suite->init != NULL)
		suite->init();
	if (test->init != NULL)
		test->init();
	test->run();
	if (test->fini != NULL)
		test->fini();
	if (suite != NULL && suite->fini != NULL)
		suite->fini();
	exit(any_failed ? FAILED : 0);
}

int main(void)
{
	unsigned tested = 0, failing = 0, crashing = 0;
	for (const struct tsan_test *test = tests; test != NULL; test = test->next) {
		int status = 0;
		if (test->is_suite)
			continue;
		(void)fflush(NULL);
		pid_t child = fork();
		if (child == 0) {
			alarm(test->timeout > 0 ? (unsigned)test->timeout * 3 : 600);
			run(test);
		}
		if (child < 0 || waitpid(child, &status, 0) != child)
			return 2;
		if (WIFEXITED(status) && WEXITSTATUS(status) == SKIPPED)
			continue;
		tested++;
		bool failed = WIFEXITED(status) && WEXITSTATUS(status) == FAILED;
		failing += failed;
		crashing += !failed && (!WIFEXITED(status) || WEXITSTATUS(status) != 0);
		if (status != 0)
			(void)fprintf(stderr, "%s::%s: status 0x%x\n", test->suite, test->name, (unsigned)status);
	}
	(void)fprintf(stderr, "Synthesis: Tested: %u | Passing: %u | Failing: %u | Crashing: %u\n", tested,
	              tested - failing - crashing, failing, crashing);
	return failing + crashing == 0 ? 0 : 1;
}
