/* SPDX-License-Identifier: Apache-2.0 */
/* The log's sink: the line's form, one write a line, levels, ranks. */
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shim/log.h"
#include "shim/options.h"
#include "transport/log.h"

static int from_log;
static int own_stderr;

/* Standard error becomes a pipe that keeps packets apart: one write, one read. */
static void catch_log(void)
{
	int ends[2];
	cr_assert_eq(pipe2(ends, O_DIRECT | O_NONBLOCK), 0);
	own_stderr = dup(2);
	dup2(ends[1], 2);
	close(ends[1]);
	from_log = ends[0];
}

static void give_back(void)
{
	dup2(own_stderr, 2);
	close(own_stderr);
	close(from_log);
}

TestSuite(options_log, .init = catch_log, .fini = give_back);

static const char *next_line(void)
{
	static char line[4097];
	ssize_t size = read(from_log, line, sizeof line - 1);
	line[size < 0 ? 0 : size] = '\0';
	return line;
}

static void expect(const char *rank, const char *rest)
{
	char line[4096];
	snprintf(line, sizeof line, "kvsplice[%d/%s] %s\n", (int)getpid(), rank, rest);
	cr_assert_str_eq(next_line(), line);
}

Test(options_log, nothing_before_it_is_installed)
{
	kvs_log(KVS_LOG_ERROR, "dropped");
	cr_assert_str_empty(next_line());
}

Test(options_log, the_line)
{
	unsetenv("KVSPLICE_LOG");
	kvs_log_install();
	kvs_log_write(KVS_LOG_WARN, "place", "%d of %s", 3, "four");
	expect("-", "warn: place: 3 of four");
	kvs_log_set_rank(5);
	kvs_log_write(KVS_LOG_ERROR, "place", "x");
	expect("5", "error: place: x");
	kvs_log_set_rank(-1);
	errno = ENOENT;
	kvs_log_write(KVS_LOG_ERROR, "open", "%m");
	cr_assert_eq(errno, ENOENT);
	expect("-", "error: open: No such file or directory");
	kvs_log(KVS_LOG_INFO, "above the level");
	cr_assert_str_empty(next_line());
}

Test(options_log, the_level)
{
	setenv("KVSPLICE_LOG", "debug", 1);
	kvs_log_install();
	cr_assert(kvs_log_enabled(KVS_LOG_DEBUG));
	kvs_log_write(KVS_LOG_DEBUG, "f", "shown");
	expect("-", "debug: f: shown");
}

Test(options_log, line_ends_inside_a_message)
{
	kvs_log_install();
	kvs_log_write(KVS_LOG_WARN, "f", "a\nb\rc\td\x1b[1m\x7f\xc3\xa9");
	expect("-", "warn: f: a b c d [1m \xc3\xa9");
}

Test(options_log, a_long_message_is_cut_and_says_so)
{
	char text[5000];
	memset(text, 'x', sizeof text - 1);
	text[sizeof text - 1] = '\0';
	kvs_log_install();
	kvs_log_write(KVS_LOG_WARN, "f", "%s", text);
	const char *line = next_line();
	size_t size = strlen(line);
	cr_assert_leq(size, 2048);
	cr_assert_str_eq(line + size - 5, "x...\n");
	memset(text, 'f', 3000);
	text[3000] = '\0';
	kvs_log_write(KVS_LOG_WARN, text, "no room for this head");
	cr_assert_str_empty(next_line());
}

Test(options_log, raw)
{
	errno = EIO;
	kvs_log_raw("a\nb\n", 4);
	cr_assert_eq(errno, EIO);
	cr_assert_str_eq(next_line(), "a\nb\n");
}

Test(options_log, a_full_stream_is_no_error)
{
	char block[4096];
	memset(block, ' ', sizeof block);
	kvs_log_install();
	while (write(2, block, sizeof block) > 0)
		;
	errno = 0;
	kvs_log_write(KVS_LOG_WARN, "f", "lost");
	cr_assert_eq(errno, 0);
}

Test(options_log, report_comes_once)
{
	setenv("KVSPLICE_HELP", "1", 1);
	setenv("KVSPLICE_STAGING_MB", "0", 1);
	kvs_log_install();
	kvs_options_report();
	kvs_options_report();
	expect("-", "warn: options: KVSPLICE_STAGING_MB=0 is outside 1 to 4096; 1 is used");
	char table[8192];
	kvs_options_table(table, sizeof table);
	cr_assert_str_eq(next_line(), table);
	cr_assert_str_empty(next_line());
}

static void *write_lines(void *argument)
{
	for (int i = 0; i < 100; i++)
		kvs_log_write(KVS_LOG_WARN, "thread", "%s", (const char *)argument);
	return NULL;
}

Test(options_log, lines_of_threads_do_not_mix)
{
	pthread_t threads[4];
	kvs_log_install();
	fcntl(2, F_SETFL, O_DIRECT); /* wait for the reader */
	fcntl(from_log, F_SETPIPE_SZ, 1 << 20);
	for (int i = 0; i < 4; i++)
		pthread_create(&threads[i], NULL, write_lines, (void *)(uintptr_t) "some words of a thread");
	for (int i = 0; i < 400; i++) {
		const char *line = next_line();
		while (!*line)
			line = next_line();
		cr_assert_str_eq(strstr(line, "] "), "] warn: thread: some words of a thread\n");
	}
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
}
