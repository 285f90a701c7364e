/* SPDX-License-Identifier: Apache-2.0 */
/* The endpoint record, as it comes in somebody's registration message. */
#include <stdlib.h>
#include <string.h>

#include "input.h"
#include "transport/record.h"
#include "transport/sock.h"

static void check(const uint8_t *data, size_t size)
{
	struct kvs_record record;
	struct kvs_text text = {.s = ""};
	char name[128];
	if (!kvs_record_decode(data, size, &record, &text)) {
		FUZZ_CHECK(text.s[0] != '\0');
		return;
	}
	FUZZ_CHECK(kvs_record_is(data, size) && record.endpoint != 0 && record.size == size);
	kvs_record_name(&record, name, sizeof(name));
	FUZZ_CHECK(strlen(name) < sizeof(name) && strlen(record.unix_name) < sizeof(record.unix_name));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input input = {.data = data, .size = size};
	struct kvs_identity identity = {.pid = 1};
	struct kvs_record record;
	check(data, size);
	/* A good one with some bytes changed, in an allocation of its exact size. */
	kvs_record_init(&record, &identity);
	record.endpoint = 1;
	record.tcp_family = 4;
	record.tcp_port = 1;
	size_t longer = sizeof(record) + input_u8(&input);
	uint8_t *body = calloc(1, longer);
	if (body == NULL)
		return 0;
	record.size = (uint32_t)longer;
	memcpy(body, &record, sizeof(record));
	longer = input_edit(&input, body, longer);
	uint8_t *exact = malloc(longer > 0 ? longer : 1);
	if (exact != NULL) {
		memcpy(exact, body, longer);
		check(exact, longer);
	}
	free(exact);
	free(body);
	return 0;
}
