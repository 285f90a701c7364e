/* SPDX-License-Identifier: Apache-2.0 */
#include "log.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "../transport/log.h"
#include "options.h"

#define LINE_SIZE 2048 /* a longer message is cut, and says so */

static _Atomic int log_rank = -1;

static const char *const level_names[] = {
        [KVS_LOG_ERROR] = "error",
        [KVS_LOG_WARN] = "warn",
        [KVS_LOG_INFO] = "info",
        [KVS_LOG_DEBUG] = "debug",
};

void kvs_log_set_rank(int rank)
{
	atomic_store_explicit(&log_rank, rank, memory_order_relaxed);
}

void kvs_log_raw(const char *data, size_t size)
{
	int saved = errno;
	/* What the stream does not take is lost: a server must not wait for, or fail with, its log. */
	ssize_t done = 0;
	do
		done = write(STDERR_FILENO, data, size);
	while (done < 0 && errno == EINTR);
	errno = saved;
}

static int format_head(char *line, size_t size, enum kvs_log_level level, const char *function)
{
	int rank = atomic_load_explicit(&log_rank, memory_order_relaxed);
	char number[16] = "-";
	if (rank >= 0)
		snprintf(number, sizeof number, "%d", rank);
	return snprintf(line, size, "kvsplice[%d/%s] %s: %s: ", (int)getpid(), number, level_names[level], function);
}

static void sink(enum kvs_log_level level, const char *function, const char *message)
{
	static const char cut[] = "...\n";
	char line[LINE_SIZE];
	int head = format_head(line, sizeof line, level, function);
	if (head < 0 || (size_t)head >= sizeof line - sizeof cut)
		return;
	size_t used = (size_t)head;
	/* Texts of others (a Python exception) may have line ends; a message stays one line. */
	while (*message && used < sizeof line - sizeof cut) {
		unsigned char c = (unsigned char)*message++;
		line[used++] = c < ' ' || c == 0x7f ? ' ' : (char)c;
	}
	const char *end = *message ? cut : cut + sizeof cut - 2;
	while (*end)
		line[used++] = *end++;
	kvs_log_raw(line, used);
}

void kvs_log_install(void)
{
	kvs_log_set_sink(sink, (enum kvs_log_level)kvs_options()->log);
}
