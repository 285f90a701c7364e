/* SPDX-License-Identifier: Apache-2.0 */
/* The one reader of KVSPLICE_* variables. */
#ifndef KVS_OPTIONS_H
#define KVS_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

enum kvs_option_policy {
	KVS_POLICY_AUTO,
	KVS_POLICY_REFUSED,
	KVS_POLICY_ALL,
	KVS_POLICY_OFF,
};

enum kvs_option_cpu_heads {
	KVS_CPU_HEADS_PADDED,
	KVS_CPU_HEADS_REPLICATED,
};

struct kvs_options {
	bool enable;
	enum kvs_option_policy policy;
	char transport[128];
	char rdma_device[64];
	int64_t rdma_gid_index; /* -1: automatic */
	char listen[128];
	char secret_file[1024];
	int64_t staging_mb;
	enum kvs_option_cpu_heads cpu_heads;
	int64_t timeout_ms;
	char stats[1024];
	int64_t log; /* enum kvs_log_level */
	bool help;
};

/* Parsed once at the first call; safe from any thread. Warnings about values and unknown names are held back until
 * kvs_options_report, so that a process that is not a server stays silent. */
const struct kvs_options *kvs_options(void);

/* Is KVSPLICE_ENABLE off? Reads that one variable and nothing else; for the constructor. */
bool kvs_options_disabled(void);

/* Write the held-back warnings (and, with KVSPLICE_HELP=1, the table) to the log, once. */
void kvs_options_report(void);

#endif
