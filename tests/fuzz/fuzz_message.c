/* SPDX-License-Identifier: Apache-2.0 */
/* The bodies of the control messages: decoded, and what comes out is judged and planned with. */
#include <stdlib.h>
#include <string.h>

#include "input.h"
#include "policy/plan.h"
#include "transport/copy.h"
#include "transport/message.h"

static const int32_t items[] = {0, 1, 2, 3};

static struct kvs_layout *make_layout(uint32_t tp_size, uint64_t item_len)
{
	struct kvs_layout *layout = kvs_layout_new(2);
	if (layout == NULL)
		return NULL;
	layout->tp_size = tp_size;
	layout->pp_size = 1;
	layout->page_size = 2;
	memcpy(layout->dtype, "bfloat16", 9);
	for (uint32_t c = 0; c < 2; c++) {
		struct kvs_component *component = &layout->components[c];
		memcpy(component->type, c == 0 ? "kv" : "swa", c == 0 ? 3 : 4);
		component->order = KVS_ORDER_NHD;
		if (!kvs_layout_set_tensors(layout, c, 2))
			break;
		for (uint32_t t = 0; t < 2; t++) {
			component->tensors[t].item_len = item_len;
			component->tensors[t].length = 4 * item_len;
			component->tensors[t].layer_id = KVS_NO_LAYER;
		}
	}
	return layout;
}

static void use_layout(const struct kvs_layout *theirs)
{
	struct kvs_layout *ours = make_layout(1, 64);
	struct kvs_text text;
	for (uint32_t c = 0; ours != NULL && c < 2; c++) {
		struct kvs_verdict verdict;
		struct kvs_plan *plan = NULL;
		kvs_policy_judge(theirs, ours, c, true, &verdict);
		if (kvs_plan_build(theirs, ours, c, items, 4, items, 4, &plan, &verdict))
			FUZZ_CHECK(kvs_copy_guard(plan, KVS_SIDE_DESTINATION, ours, c, &text));
		kvs_plan_free(plan);
	}
	kvs_layout_free(ours);
}

static void encode(uint16_t type, struct kvs_writer *writer)
{
	struct kvs_layout *layout = make_layout(2, 32);
	struct kvs_msg_hello hello = {.endpoint = 1};
	struct kvs_msg_challenge challenge = {.has_secret = 1};
	struct kvs_msg_identity identity = {.layout = layout};
	struct kvs_msg_welcome welcome = {.route_count = 2, .layout = layout};
	struct kvs_msg_pull pull = {.src_count = 4, .dst_count = 4, .src_items = items, .dst_items = items};
	struct kvs_msg_go go = {.bytes = 1};
	struct kvs_msg_data data = {.stream = 1};
	if (layout == NULL)
		return;
	switch (type) {
	case KVS_MESSAGE_HELLO:
		kvs_put_hello(writer, &hello);
		break;
	case KVS_MESSAGE_CHALLENGE:
		kvs_put_challenge(writer, &challenge);
		break;
	case KVS_MESSAGE_IDENTITY:
		kvs_put_identity(writer, &identity);
		break;
	case KVS_MESSAGE_WELCOME:
		kvs_put_welcome(writer, &welcome);
		break;
	case KVS_MESSAGE_REFUSE:
		kvs_put_string(writer, "because");
		break;
	case KVS_MESSAGE_PULL:
		kvs_put_pull(writer, &pull);
		break;
	case KVS_MESSAGE_GO:
		kvs_put_go(writer, &go);
		break;
	case KVS_MESSAGE_DATA:
		kvs_put_data(writer, &data);
		break;
	case KVS_MESSAGE_FAIL:
		kvs_put_fail(writer, 1, 2, "because");
		break;
	default:
		kvs_put_end(writer, 1, 2, "because");
	}
	kvs_layout_free(layout);
}

static bool decode(uint16_t type, struct kvs_reader *reader, struct kvs_text *text)
{
	union {
		struct kvs_msg_hello hello;
		struct kvs_msg_challenge challenge;
		struct kvs_msg_identity identity;
		struct kvs_msg_welcome welcome;
		struct kvs_msg_pull pull;
		struct kvs_msg_go go;
		struct kvs_msg_end end;
		struct kvs_msg_fail fail;
		struct kvs_msg_data data;
		struct kvs_text why;
	} msg;
	bool ok;
	switch (type) {
	case KVS_MESSAGE_HELLO:
		return kvs_get_hello(reader, &msg.hello, text);
	case KVS_MESSAGE_CHALLENGE:
		return kvs_get_challenge(reader, &msg.challenge, text);
	case KVS_MESSAGE_IDENTITY:
		ok = kvs_get_identity(reader, &msg.identity, text);
		if (ok)
			use_layout(msg.identity.layout);
		kvs_layout_free(msg.identity.layout);
		return ok;
	case KVS_MESSAGE_WELCOME:
		ok = kvs_get_welcome(reader, &msg.welcome, text);
		if (ok)
			use_layout(msg.welcome.layout);
		kvs_layout_free(msg.welcome.layout);
		return ok;
	case KVS_MESSAGE_REFUSE:
		return kvs_get_refuse(reader, &msg.why, text);
	case KVS_MESSAGE_PULL:
		ok = kvs_get_pull(reader, &msg.pull, text);
		free((void *)(uintptr_t)msg.pull.src_items);
		return ok;
	case KVS_MESSAGE_GO:
		return kvs_get_go(reader, &msg.go, text);
	case KVS_MESSAGE_DATA:
		return kvs_get_data(reader, &msg.data, text);
	case KVS_MESSAGE_FAIL:
		return kvs_get_fail(reader, &msg.fail, text);
	default:
		return kvs_get_end(reader, &msg.end, text);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input input = {.data = data, .size = size};
	struct kvs_text text = {.s = ""};
	uint16_t type = (uint16_t)(input_u8(&input) % 16);
	struct kvs_reader raw = {.data = input.data, .left = input.size};
	if (!decode(type, &raw, &text))
		FUZZ_CHECK(text.s[0] != '\0');
	struct kvs_writer writer = {.data = NULL};
	encode(type, &writer);
	size_t edited = input_edit(&input, writer.data, writer.size);
	uint8_t *exact = malloc(edited > 0 ? edited : 1);
	if (exact != NULL && writer.data != NULL) {
		memcpy(exact, writer.data, edited);
		struct kvs_reader reader = {.data = exact, .left = edited};
		text.s[0] = '\0';
		if (!decode(type, &reader, &text))
			FUZZ_CHECK(text.s[0] != '\0');
	}
	free(exact);
	free(writer.data);
	return 0;
}
