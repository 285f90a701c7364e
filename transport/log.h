/* SPDX-License-Identifier: Apache-2.0 */
/* Where messages go. The shim installs the sink (standard error, at the chosen level); without one they are dropped. */
#ifndef KVS_TRANSPORT_LOG_H
#define KVS_TRANSPORT_LOG_H

enum kvs_log_level {
	KVS_LOG_ERROR,
	KVS_LOG_WARN,
	KVS_LOG_INFO,
	KVS_LOG_DEBUG,
};

typedef void (*kvs_log_sink_t)(enum kvs_log_level level, const char *function, const char *message);

/* Install the sink and the highest level that reaches it. Any thread; the sink must be callable from any thread. */
void kvs_log_set_sink(kvs_log_sink_t sink, enum kvs_log_level level);

/* Would a message of this level be shown? */
int kvs_log_enabled(enum kvs_log_level level);

void kvs_log_write(enum kvs_log_level level, const char *function, const char *format, ...)
        __attribute__((format(printf, 3, 4)));

/* One line, no newline at its end. %m is the system's error. errno is preserved. */
#define kvs_log(level, ...) \
	do { \
		if (kvs_log_enabled(level)) \
			kvs_log_write(level, __func__, __VA_ARGS__); \
	} while (0)

#endif
