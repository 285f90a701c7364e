/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "link.h"
#include "sock.h"

#define DEFAULT_TIMEOUT_MS 30000
#define DEFAULT_STAGING    (64u << 20)
#define DEFAULT_TRANSPORTS "cuda_ipc,rdma,host,tcp,engine"

const struct kvs_config *kvs_config_get(void)
{
	struct kvs_config *config = &kvs_state.config;
	if (!kvs_state.configured) {
		memset(config, 0, sizeof(*config));
		config->timeout_ms = DEFAULT_TIMEOUT_MS;
		config->staging_bytes = DEFAULT_STAGING;
		config->order_count = kvs_transport_order(DEFAULT_TRANSPORTS, config->order, NULL);
		kvs_state.configured = true;
	}
	return config;
}

/* A copy of a string that may be NULL. False: out of memory. */
static bool copy_string(const char *from, char **to_p)
{
	*to_p = from == NULL ? NULL : strdup(from);
	return from == NULL || *to_p != NULL;
}

static bool parse(const struct kvs_agent_config *config, struct kvs_config *parsed, struct kvs_text *text)
{
	struct kvs_listen listen;
	struct kvs_text why;
	if (config->timeout_ms == 0) {
		kvs_text_set(text, "KVSPLICE_TIMEOUT_MS: 0 milliseconds are no time at all");
		return false;
	}
	parsed->timeout_ms = config->timeout_ms;
	parsed->staging_bytes = config->staging_bytes;
	parsed->splice_equal_tp = config->splice_equal_tp;
	parsed->verify = config->verify;
	parsed->rdma_gid = config->rdma_gid;
	parsed->rdma_service_level = config->rdma_service_level & 15;
	parsed->rdma_traffic_class = config->rdma_traffic_class;
	parsed->cuda_copy = config->cuda_copy;
	if (config->rdma_device != NULL)
		(void)snprintf(parsed->rdma_device, sizeof(parsed->rdma_device), "%s", config->rdma_device);
	parsed->order_count = kvs_transport_order(config->transports == NULL ? DEFAULT_TRANSPORTS : config->transports,
	                                          parsed->order, &why);
	if (parsed->order_count == 0) {
		kvs_text_set(text, "KVSPLICE_TRANSPORT: %s", why.s);
		return false;
	}
	if (config->listen != NULL && !kvs_listen_parse(config->listen, &listen, &why)) {
		kvs_text_set(text, "KVSPLICE_LISTEN: %s", why.s);
		return false;
	}
	if (config->secret_file != NULL) {
		if (!kvs_secret_read(config->secret_file, parsed->secret, &parsed->secret_size, &why)) {
			kvs_text_set(text, "KVSPLICE_SECRET_FILE: %s", why.s);
			return false;
		}
		parsed->has_secret = true;
	}
	if (!copy_string(config->listen, &parsed->listen) || !copy_string(config->stats_path, &parsed->stats_path)) {
		kvs_text_set(text, "out of memory");
		return false;
	}
	return true;
}

bool kvs_agent_configure(const struct kvs_agent_config *config, struct kvs_text *text)
{
	struct kvs_config parsed;
	memset(&parsed, 0, sizeof(parsed));
	if (!parse(config, &parsed, text)) {
		free(parsed.listen);
		free(parsed.stats_path);
		return false;
	}
	kvs_lock();
	free(kvs_state.config.listen);
	free(kvs_state.config.stats_path);
	kvs_state.config = parsed;
	kvs_state.configured = true;
	kvs_unlock();
	return true;
}
