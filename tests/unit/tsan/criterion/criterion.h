/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the unit tests use of Criterion, for the thread sanitizer's build alone: Criterion maps its arena at addresses
 * that this sanitizer keeps for itself ("Could not initialize inheritable arena"). Each test runs in a process of its
 * own here too, and the last line is the same as Criterion's.
 */
#ifndef KVS_TEST_TSAN_CRITERION_H
#define KVS_TEST_TSAN_CRITERION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tsan_test {
	struct tsan_test *next;
	const char *suite;
	const char *name;
	void (*run)(void);
	double timeout; /* seconds; 0: the runner's */
	bool is_suite;  /* only its init and fini count */
	void (*init)(void);
	void (*fini)(void);
};

void tsan_test_add(struct tsan_test *test);

/* Reports a failed check; the optional format and its arguments follow, NULL ends them. die: end the test. */
void tsan_check(const char *file, int line, const char *expression, bool die, bool ok, ...);
void tsan_skip(void) __attribute__((noreturn));

#define TSAN_ADD(record) \
	__attribute__((constructor)) static void record##_add(void) \
	{ \
		tsan_test_add(&(record)); \
	}

#define Test(test_suite, test_name, ...) \
	static void test_suite##_##test_name##_run(void); \
	static struct tsan_test test_suite##_##test_name##_record = { \
	        .suite = #test_suite, .name = #test_name, .run = test_suite##_##test_name##_run, ##__VA_ARGS__}; \
	TSAN_ADD(test_suite##_##test_name##_record) \
	static void test_suite##_##test_name##_run(void)

#define TestSuite(test_suite, ...) \
	static struct tsan_test test_suite##_suite_record = {.suite = #test_suite, .is_suite = true, ##__VA_ARGS__}; \
	TSAN_ADD(test_suite##_suite_record) \
	extern int test_suite##_suite_end

#define TSAN_FIRST(first, ...) first
#define TSAN_REST(first, ...)  __VA_ARGS__
#define TSAN_CHECK(die, ...) \
	tsan_check(__FILE__, __LINE__, #__VA_ARGS__, die, (TSAN_FIRST(__VA_ARGS__, 0)) ? true : false, \
	           TSAN_REST(__VA_ARGS__, NULL))

#define cr_assert(...)                  TSAN_CHECK(true, __VA_ARGS__)
#define cr_expect(...)                  TSAN_CHECK(false, __VA_ARGS__)
#define cr_assert_not(a, ...)           TSAN_CHECK(true, !(a), ##__VA_ARGS__)
#define cr_expect_not(a, ...)           TSAN_CHECK(false, !(a), ##__VA_ARGS__)
#define cr_assert_fail(...)             TSAN_CHECK(true, false, ##__VA_ARGS__)
#define cr_assert_null(a, ...)          TSAN_CHECK(true, (a) == NULL, ##__VA_ARGS__)
#define cr_assert_eq(a, b, ...)         TSAN_CHECK(true, (a) == (b), ##__VA_ARGS__)
#define cr_expect_eq(a, b, ...)         TSAN_CHECK(false, (a) == (b), ##__VA_ARGS__)
#define cr_assert_neq(a, b, ...)        TSAN_CHECK(true, (a) != (b), ##__VA_ARGS__)
#define cr_assert_gt(a, b, ...)         TSAN_CHECK(true, (a) > (b), ##__VA_ARGS__)
#define cr_assert_geq(a, b, ...)        TSAN_CHECK(true, (a) >= (b), ##__VA_ARGS__)
#define cr_assert_lt(a, b, ...)         TSAN_CHECK(true, (a) < (b), ##__VA_ARGS__)
#define cr_assert_leq(a, b, ...)        TSAN_CHECK(true, (a) <= (b), ##__VA_ARGS__)
#define cr_assert_not_null(a, ...)      TSAN_CHECK(true, (a) != NULL, ##__VA_ARGS__)
#define cr_assert_str_eq(a, b, ...)     TSAN_CHECK(true, strcmp((a), (b)) == 0, ##__VA_ARGS__)
#define cr_expect_str_eq(a, b, ...)     TSAN_CHECK(false, strcmp((a), (b)) == 0, ##__VA_ARGS__)
#define cr_assert_str_neq(a, b, ...)    TSAN_CHECK(true, strcmp((a), (b)) != 0, ##__VA_ARGS__)
#define cr_assert_str_empty(a, ...)     TSAN_CHECK(true, (a)[0] == '\0', ##__VA_ARGS__)
#define cr_assert_str_not_empty(a, ...) TSAN_CHECK(true, (a)[0] != '\0', ##__VA_ARGS__)
#define cr_log_info(...)                ((void)fprintf(stderr, __VA_ARGS__), (void)fputc('\n', stderr))
#define cr_skip(...)                    tsan_skip()

#endif
