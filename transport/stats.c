/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "link.h"
#include "log.h"
#include "rooms.h"

#define PERIOD_NS 1000000000u

/* Name, help, member: the plain counters. */
#define COUNTER_TABLE(X) \
	X("rooms_opened", "Rooms opened at this decode", rooms_opened) \
	X("rooms_done", "Rooms that bytes were moved for and that succeeded", rooms_done) \
	X("rooms_failed", "Rooms that failed with a reason of kvsplice's", rooms_failed) \
	X("pulls_served", "Pulls completed by this decode", pulls_served) \
	X("pulls_failed", "Pulls that this decode ended without success", pulls_failed) \
	X("pulls_asked", "Pulls completed for this prefill", pulls_asked) \
	X("pulls_refused", "Pulls that ended without success at this prefill", pulls_refused) \
	X("links_ready", "Peers that the handshake succeeded with", links_ready) \
	X("links_refused", "Peers that the handshake failed with", links_refused) \
	X("links_lost", "Connections lost after the handshake", links_lost)

void kvs_stats_changed(struct kvs_stats *stats)
{
	stats->changed = true;
}

int kvs_stats_due_ms(uint64_t now_ns)
{
	const struct kvs_stats *stats = &kvs_state.stats;
	if (!stats->changed || kvs_config_get()->stats_path == NULL)
		return -1;
	uint64_t due = stats->written_ns + PERIOD_NS;
	return due <= now_ns ? 0 : (int)((due - now_ns) / 1000000) + 1;
}

static void put(struct kvs_writer *writer, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(struct kvs_writer *writer, const char *format, ...)
{
	char line[1024];
	va_list args;
	va_start(args, format);
	int length = vsnprintf(line, sizeof(line), format, args);
	va_end(args);
	if (length > 0)
		kvs_put_bytes(writer, line, (size_t)length < sizeof(line) ? (size_t)length : sizeof(line) - 1);
}

/* A label's value: what the format would misread becomes an apostrophe or a space. */
static void put_label(struct kvs_writer *writer, const char *name, const char *value)
{
	char clean[KVS_TEXT_SIZE];
	size_t length = strnlen(value, sizeof(clean) - 1);
	for (size_t i = 0; i < length; i++)
		clean[i] = value[i] == '"' || value[i] == '\\' ? '\'' : value[i] == '\n' ? ' ' : value[i];
	clean[length] = '\0';
	put(writer, "%s=\"%s\"", name, clean);
}

static void put_by_transport(struct kvs_writer *writer, const char *name, const char *help, const uint64_t *values)
{
	put(writer, "# HELP kvsplice_%s %s\n# TYPE kvsplice_%s counter\n", name, help, name);
	for (uint32_t i = 0; i < KVS_TRANSPORT_COUNT; i++) {
		if (kvs_transports[i].ops != NULL)
			put(writer, "kvsplice_%s{route=\"%s\"} %" PRIu64 "\n", name, kvs_transports[i].name, values[i]);
	}
}

static void put_links(struct kvs_writer *writer)
{
	put(writer, "# HELP kvsplice_link The peers and the transport in use with each; 0: not connected\n"
	            "# TYPE kvsplice_link gauge\n");
	for (const struct kvs_link *link = kvs_state.links; link != NULL; link = link->next) {
		if (link->state != KVS_LINK_READY && link->state != KVS_LINK_DEAD)
			continue;
		put(writer, "kvsplice_link{role=\"%s\",link=\"%" PRIu64 "\",route=\"%s\",",
		    link->role == KVS_ROLE_PREFILL ? "prefill" : "decode", link->id,
		    link->route_count > 0 ? kvs_transports[link->route[0]].name : "none");
		put_label(writer, "peer", link->name);
		put(writer, "} %d\n", link->state == KVS_LINK_READY);
	}
}

char *kvs_stats_text(size_t *size_p)
{
	const struct kvs_stats *stats = &kvs_state.stats;
	struct kvs_writer writer = {.data = NULL};
	if (kvs_config_get()->stats_path == NULL)
		return NULL;
#define X(name, help, member) \
	put(&writer, "# HELP kvsplice_%s_total %s\n# TYPE kvsplice_%s_total counter\nkvsplice_%s_total %" PRIu64 "\n", \
	    name, help, name, name, stats->member);
	COUNTER_TABLE(X)
#undef X
	put(&writer,
	    "# HELP kvsplice_rooms_open Rooms that are open now\n# TYPE kvsplice_rooms_open gauge\n"
	    "kvsplice_rooms_open %u\n",
	    kvs_rooms_count());
	put_by_transport(&writer, "received_bytes_total", "Bytes put in place by this decode", stats->bytes_in);
	put_by_transport(&writer, "sent_bytes_total", "Bytes packed by this prefill", stats->bytes_out);
	put_by_transport(&writer, "fallbacks_total", "Hand-overs from this transport to the next in mid-request",
	                 stats->fallbacks);
	for (uint32_t i = 0; i < KVS_TRANSPORT_COUNT; i++) {
		if (stats->fallbacks[i] == 0)
			continue;
		put(&writer, "kvsplice_fallback_info{route=\"%s\",", kvs_transports[i].name);
		put_label(&writer, "reason", stats->fallback_reason[i].s);
		put(&writer, "} 1\n");
	}
	put(&writer, "# HELP kvsplice_refusals_total Components refused, by reason\n"
	             "# TYPE kvsplice_refusals_total counter\n");
	for (int i = KVS_REFUSE_NONE + 1; i < KVS_REFUSAL_COUNT; i++)
		put(&writer, "kvsplice_refusals_total{reason=\"%s\"} %" PRIu64 "\n",
		    kvs_refusal_name((enum kvs_refusal)i), stats->refusals[i]);
	put_links(&writer);
	if (writer.failed) {
		free(writer.data);
		return NULL;
	}
	*size_p = writer.size;
	return (char *)writer.data;
}

void kvs_stats_write(const char *path, const char *text, size_t size)
{
	static atomic_bool complained;
	char *name = NULL, *temporary = NULL;
	if (asprintf(&name, "%s.%d", path, (int)getpid()) < 0)
		return;
	if (asprintf(&temporary, "%s.new", name) < 0) {
		free(name);
		return;
	}
	/* Not through a link that somebody else may have put there. */
	(void)unlink(temporary);
	int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
	bool ok = fd >= 0;
	while (ok && size > 0) {
		ssize_t put_now = write(fd, text, size);
		ok = put_now > 0;
		text += ok ? put_now : 0;
		size -= ok ? (size_t)put_now : 0;
	}
	if (fd >= 0)
		close(fd);
	ok = ok && rename(temporary, name) == 0;
	if (!ok && !atomic_exchange(&complained, true))
		kvs_log(KVS_LOG_WARN, "cannot write the metrics file %s: %m; check KVSPLICE_STATS", name);
	if (!ok && fd >= 0)
		(void)unlink(temporary);
	free(temporary);
	free(name);
}

void kvs_stats_flush(bool always)
{
	size_t size = 0;
	char *text = NULL, *path = NULL;
	kvs_lock();
	uint64_t now = kvs_now_ns();
	if (kvs_stats_due_ms(now) == 0 || (always && kvs_state.stats.changed)) {
		text = kvs_stats_text(&size);
		if (text != NULL)
			path = strdup(kvs_config_get()->stats_path);
		kvs_state.stats.changed = false;
		kvs_state.stats.written_ns = now;
	}
	kvs_unlock();
	if (path != NULL)
		kvs_stats_write(path, text, size);
	free(path);
	free(text);
}
