/* SPDX-License-Identifier: Apache-2.0 */
#include "log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#define LINE_SIZE 2048

/* Two atomics and no lock: a lock here would be one more to take before a fork. */
static _Atomic(kvs_log_sink_t) log_sink;
static atomic_int log_level = KVS_LOG_WARN;

void kvs_log_set_sink(kvs_log_sink_t sink, enum kvs_log_level level)
{
	atomic_store(&log_level, (int)level);
	atomic_store(&log_sink, sink);
}

int kvs_log_enabled(enum kvs_log_level level)
{
	return (int)level <= atomic_load_explicit(&log_level, memory_order_relaxed) && atomic_load(&log_sink) != NULL;
}

void kvs_log_write(enum kvs_log_level level, const char *function, const char *format, ...)
{
	int saved = errno;
	kvs_log_sink_t sink = atomic_load(&log_sink);
	if (sink != NULL && kvs_log_enabled(level)) {
		char line[LINE_SIZE];
		va_list args;
		va_start(args, format);
		errno = saved; /* for %m */
		(void)vsnprintf(line, sizeof(line), format, args);
		va_end(args);
		sink(level, function, line);
	}
	errno = saved;
}
