/* SPDX-License-Identifier: Apache-2.0 */
/* The one reader of KVSPLICE_* variables, and the one list of them. */
#ifndef KVS_OPTIONS_H
#define KVS_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Values of WORD options, in the order of their words below. */
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

/* Transports that the table knows. */
#define KVS_TRANSPORT_NAMES "cuda_ipc rdma host tcp engine"

#define KVS_POLICY_WORDS "auto refused all off"

/*
 * Every variable, once: the structure below, the reader and the printed table are made from these rows. NAME is what
 * follows KVSPLICE_.
 *
 * FLAG(field, NAME, default, default as text, help)
 * WORD(field, NAME, words, default, default as text, help): the field is the word's number
 * NUMBER(field, NAME, least, most, default, default as text, help)
 * TEXT(field, NAME, size, words, range, default, default as text, help): words: NULL, or the names that a
 *     comma-separated list may have
 */
#define KVS_OPTION_TABLE(FLAG, WORD, NUMBER, TEXT) \
	FLAG(enable, "ENABLE", true, "1", "0: a true kill switch, nothing looked up, nothing hooked") \
	WORD(policy, "POLICY", KVS_POLICY_WORDS, KVS_POLICY_AUTO, "auto", \
	     "auto: splice what upstream refuses or slices; refused: only what it refuses; all: equal TP too; " \
	     "off: observe and log") \
	TEXT(transport, "TRANSPORT", 128, KVS_TRANSPORT_NAMES, "comma-separated list of names", \
	     "cuda_ipc,rdma,host,tcp,engine", "cuda_ipc,rdma,host,tcp,engine", "order and choice of transports") \
	TEXT(rdma_device, "RDMA_DEVICE", 64, NULL, "NAME[:PORT]", "", "automatic", "which RDMA device and port") \
	NUMBER(rdma_gid_index, "RDMA_GID_INDEX", 0, 255, -1, "automatic", "the only GID of the device to use") \
	NUMBER(rdma_service_level, "RDMA_SERVICE_LEVEL", 0, 15, 0, "0", "InfiniBand service level of READs") \
	NUMBER(rdma_traffic_class, "RDMA_TRAFFIC_CLASS", 0, 255, 0, "0", \
	       "traffic class of READs: DSCP times 4 on RoCE v2") \
	WORD(cuda_copy, "CUDA_COPY", "auto kernel 2d", 0, "auto", \
	     "how GPU memory is copied on one host: auto by the length of the runs, kernel or 2d always") \
	FLAG(verify, "VERIFY", false, "0", \
	     "1: the decode compares a digest of the bytes in place with the prefill's; costs time") \
	TEXT(listen, "LISTEN", 128, NULL, "ADDRESS[:FIRST-LAST]", "", "the server's own address", \
	     "address and ports of the control socket; each rank takes the next free port") \
	TEXT(secret_file, "SECRET_FILE", 1024, NULL, "path", "", "unset", \
	     "a shared secret: peers prove that they know it") \
	NUMBER(staging_mb, "STAGING_MB", 1, 4096, 64, "64", \
	       "most staging memory per peer, MiB: host takes up to 2 of it, rdma up to 16") \
	WORD(cpu_heads, "CPU_HEADS", "padded replicated", KVS_CPU_HEADS_PADDED, "padded", \
	     "replicated: a CPU server whose head padding was turned off") \
	NUMBER(timeout_ms, "TIMEOUT_MS", 100, 3600000, 30000, "30000", "for one request's transfer, milliseconds") \
	TEXT(stats, "STATS", 1024, NULL, "path", "", "unset", "path of the metrics file; the process id is added") \
	WORD(log, "LOG", "error warn info debug", 1, "warn", \
	     "the least important messages that are shown: error, warn, info or debug") \
	FLAG(help, "HELP", false, "unset", "1: print this table and go on")

struct kvs_options {
#define KVS_FIELD_FLAG(field, ...)          bool field;
#define KVS_FIELD_NUMBER(field, ...)        int64_t field;
#define KVS_FIELD_TEXT(field, name, n, ...) char field[n];
	KVS_OPTION_TABLE(KVS_FIELD_FLAG, KVS_FIELD_NUMBER, KVS_FIELD_NUMBER, KVS_FIELD_TEXT)
#undef KVS_FIELD_FLAG
#undef KVS_FIELD_NUMBER
#undef KVS_FIELD_TEXT
};

/* Parsed once at the first call; safe from any thread. Warnings about values and unknown names are held back until
 * kvs_options_report, so that a process that is not a server stays silent. */
const struct kvs_options *kvs_options(void);

/* In a forked child, at its first call: read the environment again, which a fork server's child has been given after
 * the fork, and warn about values if any has changed. To be called where a process registers, before any thread of it
 * uses the options; does nothing in a process that has read them itself. */
void kvs_options_renew(void);

/* Is KVSPLICE_ENABLE off? Reads that one variable and nothing else; for the constructor. */
bool kvs_options_disabled(void);

/* Write the held-back warnings (and, with KVSPLICE_HELP=1, the table) to the log, once. */
void kvs_options_report(void);

/* ---- the parts, for tests and for the program that prints the table ---- */

/* A complaint about one variable: a value that was not taken as it is, a name that does not exist. */
typedef void (*kvs_options_complain_t)(void *user, const char *message);

/* Read the variables of environment (as environ) into *options_p; complain may be NULL. */
void kvs_options_read(char *const *environment, struct kvs_options *options_p, kvs_options_complain_t complain,
                      void *user);

/* The word of this number among space-separated words, and its size; NULL: there is none. */
const char *kvs_option_word_name(const char *words, int64_t number, int *size_p);

/* The table as text, one row a variable, NUL-terminated and truncated like snprintf; returns the size it needs. */
size_t kvs_options_table(char *buffer_p, size_t size);

#endif
