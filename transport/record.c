/* SPDX-License-Identifier: Apache-2.0 */
#include "record.h"

#include <string.h>

static const uint8_t record_magic[8] = {'K', 'V', 'S', 'P', 'L', 'I', 'C', 'E'};

void kvs_record_init(struct kvs_record *record_p, const struct kvs_identity *identity)
{
	memset(record_p, 0, sizeof(*record_p));
	memcpy(record_p->magic, record_magic, sizeof(record_magic));
	record_p->major = KVS_RECORD_MAJOR;
	record_p->minor = KVS_RECORD_MINOR;
	record_p->size = sizeof(*record_p);
	memcpy(record_p->boot_id, identity->boot_id, sizeof(record_p->boot_id));
	record_p->pid_namespace = identity->pid_namespace;
	record_p->start_time = identity->start_time;
	record_p->pid = identity->pid;
	record_p->uid = identity->uid;
}

void kvs_record_identity(const struct kvs_record *record, struct kvs_identity *identity_p)
{
	memcpy(identity_p->boot_id, record->boot_id, sizeof(identity_p->boot_id));
	identity_p->pid_namespace = record->pid_namespace;
	identity_p->start_time = record->start_time;
	identity_p->pid = record->pid;
	identity_p->uid = record->uid;
}

bool kvs_record_is(const void *data, size_t size)
{
	return data != NULL && size >= sizeof(record_magic) && memcmp(data, record_magic, sizeof(record_magic)) == 0;
}

bool kvs_record_decode(const void *data, size_t size, struct kvs_record *record_p, struct kvs_text *text)
{
	struct kvs_record record = {.major = 0};
	if (!kvs_record_is(data, size)) {
		kvs_text_set(text, "not an endpoint record: %zu bytes without its magic", size);
		return false;
	}
	memcpy(&record, data, size < sizeof(record) ? size : sizeof(record));
	if (size < offsetof(struct kvs_record, boot_id)) {
		kvs_text_set(text, "endpoint record cut off: %zu bytes", size);
		return false;
	}
	if (record.major != KVS_RECORD_MAJOR) {
		kvs_text_set(text,
		             "endpoint record of version %u, this build reads version %u: "
		             "run one kvsplice version on both sides",
		             record.major, KVS_RECORD_MAJOR);
		return false;
	}
	if (record.size < sizeof(record) || record.size > KVS_RECORD_MAX || record.size != size) {
		kvs_text_set(text, "endpoint record of %zu bytes says that it has %u (%zu to %d are possible)", size,
		             record.size, sizeof(record), KVS_RECORD_MAX);
		return false;
	}
	if (record.endpoint == 0 || memchr(record.unix_name, '\0', sizeof(record.unix_name)) == NULL) {
		kvs_text_set(text, "endpoint record without an endpoint number or with an endless socket name");
		return false;
	}
	if (record.tcp_family != 0 && record.tcp_family != 4 && record.tcp_family != 6) {
		kvs_text_set(text, "endpoint record with address family %u (4, 6 or 0 for none are possible)",
		             record.tcp_family);
		return false;
	}
	if (record.unix_name[0] == '\0' && (record.tcp_family == 0 || record.tcp_port == 0)) {
		kvs_text_set(text, "endpoint record without any address to connect to");
		return false;
	}
	*record_p = record;
	return true;
}
