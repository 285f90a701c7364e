/* SPDX-License-Identifier: Apache-2.0 */
#include "wire.h"

#include <stdlib.h>
#include <string.h>

#include "sha256.h"

struct message_row {
	const char *name;
	uint32_t limit;
	uint16_t type;
};

static const struct message_row message_rows[] = {
#define X(id, number, name, limit) {name, limit, number},
        KVS_MESSAGE_TABLE(X)
#undef X
};

static const struct message_row *find_row(uint16_t type)
{
	for (size_t i = 0; i < sizeof(message_rows) / sizeof(message_rows[0]); i++) {
		if (message_rows[i].type == type)
			return &message_rows[i];
	}
	return NULL;
}

const char *kvs_message_name(uint16_t type)
{
	const struct message_row *row = find_row(type);
	return row == NULL ? "unknown" : row->name;
}

void kvs_wire_header_init(struct kvs_wire_header *header_p, uint16_t type, uint32_t length,
                          const uint8_t key[KVS_KEY_SIZE])
{
	memset(header_p, 0, sizeof(*header_p));
	header_p->magic = KVS_WIRE_MAGIC;
	header_p->version = KVS_WIRE_VERSION;
	header_p->type = type;
	header_p->length = length;
	memcpy(header_p->key, key, KVS_KEY_SIZE);
}

bool kvs_wire_header_check(const struct kvs_wire_header *header, const uint8_t key[KVS_KEY_SIZE], struct kvs_text *text)
{
	if (header->magic != KVS_WIRE_MAGIC) {
		kvs_text_set(text, "not a kvsplice message: it begins with 0x%08x", header->magic);
		return false;
	}
	if (header->version != KVS_WIRE_VERSION) {
		kvs_text_set(text,
		             "message of version %u, this build speaks %d: run one kvsplice version on both sides",
		             header->version, KVS_WIRE_VERSION);
		return false;
	}
	const struct message_row *row = find_row(header->type);
	if (row == NULL) {
		kvs_text_set(text, "message of unknown type %u", header->type);
		return false;
	}
	if (header->length > row->limit || header->zero != 0) {
		kvs_text_set(text, "%s message of %u bytes (at most %u are possible)", row->name, header->length,
		             row->limit);
		return false;
	}
	if (!kvs_equal_constant_time(header->key, key, KVS_KEY_SIZE)) {
		kvs_text_set(text, "%s message with a wrong key: it is not meant for this process", row->name);
		return false;
	}
	return true;
}

void kvs_put_bytes(struct kvs_writer *writer, const void *data, size_t size)
{
	if (writer->failed || size == 0)
		return;
	if (writer->capacity - writer->size < size) {
		size_t capacity = writer->capacity < 256 ? 256 : writer->capacity;
		while (capacity - writer->size < size)
			capacity *= 2; /* far from wrapping: bodies are bounded by a few MiB */
		uint8_t *grown = realloc(writer->data, capacity);
		if (grown == NULL) {
			writer->failed = true;
			return;
		}
		writer->data = grown;
		writer->capacity = capacity;
	}
	memcpy(writer->data + writer->size, data, size);
	writer->size += size;
}

void kvs_put_u32(struct kvs_writer *writer, uint32_t value)
{
	kvs_put_bytes(writer, &value, sizeof(value));
}

void kvs_put_u64(struct kvs_writer *writer, uint64_t value)
{
	kvs_put_bytes(writer, &value, sizeof(value));
}

void kvs_put_string(struct kvs_writer *writer, const char *text)
{
	size_t length = strnlen(text, KVS_TEXT_SIZE - 1);
	kvs_put_u32(writer, (uint32_t)length);
	kvs_put_bytes(writer, text, length);
}

void kvs_put_layout(struct kvs_writer *writer, const struct kvs_layout *layout)
{
	kvs_put_u32(writer, layout->tp_size);
	kvs_put_u32(writer, layout->tp_rank);
	kvs_put_u32(writer, layout->pp_size);
	kvs_put_u32(writer, layout->pp_rank);
	kvs_put_u32(writer, layout->page_size);
	kvs_put_bytes(writer, layout->dtype, sizeof(layout->dtype));
	kvs_put_u32(writer, (uint32_t)layout->head_rule);
	kvs_put_u32(writer, layout->component_count);
	for (uint32_t c = 0; c < layout->component_count; c++) {
		const struct kvs_component *component = &layout->components[c];
		kvs_put_bytes(writer, component->type, sizeof(component->type));
		kvs_put_u32(writer, (uint32_t)component->order);
		kvs_put_u32(writer, component->tensor_count);
		for (uint32_t t = 0; t < component->tensor_count; t++) {
			kvs_put_u64(writer, component->tensors[t].length);
			kvs_put_u64(writer, component->tensors[t].item_len);
			kvs_put_u32(writer, (uint32_t)component->tensors[t].layer_id);
		}
	}
}

void kvs_get_bytes(struct kvs_reader *reader, void *data_p, size_t size)
{
	if (reader->failed || reader->left < size) {
		reader->failed = true;
		memset(data_p, 0, size);
		return;
	}
	memcpy(data_p, reader->data, size);
	reader->data += size;
	reader->left -= size;
}

const void *kvs_get_inside(struct kvs_reader *reader, size_t size)
{
	const void *at = reader->data;
	if (size == 0)
		return NULL;
	if (reader->failed || size > reader->left) {
		reader->failed = true;
		return NULL;
	}
	reader->data += size;
	reader->left -= size;
	return at;
}

uint32_t kvs_get_u32(struct kvs_reader *reader)
{
	uint32_t value;
	kvs_get_bytes(reader, &value, sizeof(value));
	return value;
}

uint64_t kvs_get_u64(struct kvs_reader *reader)
{
	uint64_t value;
	kvs_get_bytes(reader, &value, sizeof(value));
	return value;
}

void kvs_get_text(struct kvs_reader *reader, struct kvs_text *text_p)
{
	uint32_t length = kvs_get_u32(reader);
	memset(text_p, 0, sizeof(*text_p));
	if (length >= KVS_TEXT_SIZE) {
		reader->failed = true;
		return;
	}
	kvs_get_bytes(reader, text_p->s, length);
	/* It goes to a log: one line, no terminal control. */
	for (uint32_t i = 0; i < length; i++) {
		if ((unsigned char)text_p->s[i] < ' ' || text_p->s[i] == 0x7f)
			text_p->s[i] = '?';
	}
}

static bool get_component(struct kvs_reader *reader, struct kvs_layout *layout, uint32_t c, struct kvs_text *text)
{
	struct kvs_component *component = &layout->components[c];
	kvs_get_bytes(reader, component->type, sizeof(component->type));
	uint32_t order = kvs_get_u32(reader);
	uint32_t tensor_count = kvs_get_u32(reader);
	if (order > KVS_ORDER_HND || tensor_count > KVS_MAX_TENSORS || reader->left / 20 < tensor_count) {
		kvs_text_set(text, "layout of a peer: component %u has page order %u and %u tensors in %zu bytes", c,
		             order, tensor_count, reader->left);
		return false;
	}
	component->order = (enum kvs_page_order)order;
	if (tensor_count > 0 && !kvs_layout_set_tensors(layout, c, tensor_count)) {
		kvs_text_set(text, "out of memory");
		return false;
	}
	for (uint32_t t = 0; t < tensor_count; t++) {
		component->tensors[t].length = kvs_get_u64(reader);
		component->tensors[t].item_len = kvs_get_u64(reader);
		component->tensors[t].layer_id = (int32_t)kvs_get_u32(reader);
	}
	return true;
}

struct kvs_layout *kvs_get_layout(struct kvs_reader *reader, struct kvs_text *text)
{
	struct kvs_layout head;
	memset(&head, 0, sizeof(head));
	head.tp_size = kvs_get_u32(reader);
	head.tp_rank = kvs_get_u32(reader);
	head.pp_size = kvs_get_u32(reader);
	head.pp_rank = kvs_get_u32(reader);
	head.page_size = kvs_get_u32(reader);
	kvs_get_bytes(reader, head.dtype, sizeof(head.dtype));
	uint32_t head_rule = kvs_get_u32(reader);
	uint32_t component_count = kvs_get_u32(reader);
	if (reader->failed || head_rule > KVS_HEADS_PADDED || component_count > KVS_MAX_COMPONENTS) {
		kvs_text_set(text, "layout of a peer: cut off, or head rule %u, or %u components (at most %d)",
		             head_rule, component_count, KVS_MAX_COMPONENTS);
		return NULL;
	}
	struct kvs_layout *layout = kvs_layout_new(component_count);
	if (layout == NULL) {
		kvs_text_set(text, "out of memory");
		return NULL;
	}
	head.head_rule = (enum kvs_head_rule)head_rule;
	head.component_count = layout->component_count;
	head.components = layout->components;
	*layout = head;
	for (uint32_t c = 0; c < component_count; c++) {
		if (!get_component(reader, layout, c, text))
			goto failed;
	}
	if (reader->failed) {
		kvs_text_set(text, "layout of a peer: cut off");
		goto failed;
	}
	if (!kvs_layout_check(layout, text))
		goto failed;
	return layout;
failed:
	kvs_layout_free(layout);
	return NULL;
}
