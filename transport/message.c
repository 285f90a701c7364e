/* SPDX-License-Identifier: Apache-2.0 */
#include "message.h"

#include <stdlib.h>
#include <string.h>

/* A body is right when nothing was missing and nothing is left over. */
static bool whole(const struct kvs_reader *reader, const char *name, struct kvs_text *text)
{
	if (reader->failed) {
		kvs_text_set(text, "%s message cut off", name);
		return false;
	}
	if (reader->left > 0) {
		kvs_text_set(text, "%s message with %zu bytes too many", name, reader->left);
		return false;
	}
	return true;
}

void kvs_put_hello(struct kvs_writer *writer, const struct kvs_msg_hello *msg)
{
	kvs_put_u64(writer, msg->endpoint);
	kvs_put_u32(writer, msg->has_secret);
	kvs_put_bytes(writer, msg->nonce, sizeof(msg->nonce));
}

bool kvs_get_hello(struct kvs_reader *reader, struct kvs_msg_hello *msg_p, struct kvs_text *text)
{
	msg_p->endpoint = kvs_get_u64(reader);
	msg_p->has_secret = kvs_get_u32(reader);
	kvs_get_bytes(reader, msg_p->nonce, sizeof(msg_p->nonce));
	return whole(reader, "hello", text);
}

void kvs_put_challenge(struct kvs_writer *writer, const struct kvs_msg_challenge *msg)
{
	kvs_put_u32(writer, msg->has_secret);
	kvs_put_bytes(writer, msg->nonce, sizeof(msg->nonce));
	kvs_put_bytes(writer, msg->proof, sizeof(msg->proof));
}

bool kvs_get_challenge(struct kvs_reader *reader, struct kvs_msg_challenge *msg_p, struct kvs_text *text)
{
	msg_p->has_secret = kvs_get_u32(reader);
	kvs_get_bytes(reader, msg_p->nonce, sizeof(msg_p->nonce));
	kvs_get_bytes(reader, msg_p->proof, sizeof(msg_p->proof));
	return whole(reader, "challenge", text);
}

void kvs_put_identity(struct kvs_writer *writer, const struct kvs_msg_identity *msg)
{
	kvs_put_bytes(writer, msg->proof, sizeof(msg->proof));
	kvs_put_bytes(writer, msg->identity.boot_id, sizeof(msg->identity.boot_id));
	kvs_put_u64(writer, msg->identity.pid_namespace);
	kvs_put_u64(writer, msg->identity.start_time);
	kvs_put_u32(writer, msg->identity.pid);
	kvs_put_u32(writer, msg->identity.uid);
	kvs_put_u32(writer, msg->transports);
	kvs_put_u32(writer, msg->device_memory);
	kvs_put_u32(writer, msg->splice_equal_tp);
	kvs_put_rdma_offer(writer, &msg->rdma);
	kvs_put_u32(writer, msg->cuda_size);
	kvs_put_bytes(writer, msg->cuda, msg->cuda_size);
	kvs_put_layout(writer, msg->layout);
}

bool kvs_get_identity(struct kvs_reader *reader, struct kvs_msg_identity *msg_p, struct kvs_text *text)
{
	kvs_get_bytes(reader, msg_p->proof, sizeof(msg_p->proof));
	kvs_get_bytes(reader, msg_p->identity.boot_id, sizeof(msg_p->identity.boot_id));
	msg_p->identity.pid_namespace = kvs_get_u64(reader);
	msg_p->identity.start_time = kvs_get_u64(reader);
	msg_p->identity.pid = kvs_get_u32(reader);
	msg_p->identity.uid = kvs_get_u32(reader);
	msg_p->transports = kvs_get_u32(reader);
	msg_p->device_memory = kvs_get_u32(reader);
	msg_p->splice_equal_tp = kvs_get_u32(reader);
	kvs_get_rdma_offer(reader, &msg_p->rdma);
	msg_p->cuda_size = kvs_get_u32(reader);
	msg_p->cuda = kvs_get_inside(reader, msg_p->cuda_size);
	msg_p->layout = kvs_get_layout(reader, text);
	if (msg_p->layout == NULL)
		return false;
	if (whole(reader, "identity", text))
		return true;
	kvs_layout_free(msg_p->layout);
	msg_p->layout = NULL;
	return false;
}

void kvs_put_welcome(struct kvs_writer *writer, const struct kvs_msg_welcome *msg)
{
	kvs_put_bytes(writer, msg->token, sizeof(msg->token));
	kvs_put_u32(writer, msg->slot_count);
	kvs_put_u32(writer, msg->slot_size);
	kvs_put_u32(writer, msg->route_count);
	for (uint32_t i = 0; i < msg->route_count; i++)
		kvs_put_u32(writer, msg->route[i]);
	kvs_put_string(writer, msg->why.s);
	kvs_put_layout(writer, msg->layout);
}

bool kvs_get_welcome(struct kvs_reader *reader, struct kvs_msg_welcome *msg_p, struct kvs_text *text)
{
	msg_p->layout = NULL;
	kvs_get_bytes(reader, msg_p->token, sizeof(msg_p->token));
	msg_p->slot_count = kvs_get_u32(reader);
	msg_p->slot_size = kvs_get_u32(reader);
	msg_p->route_count = kvs_get_u32(reader);
	if (msg_p->route_count > KVS_ROUTE_MAX) {
		kvs_text_set(text, "welcome message with a route of %u transports (at most %d)", msg_p->route_count,
		             KVS_ROUTE_MAX);
		return false;
	}
	for (uint32_t i = 0; i < msg_p->route_count; i++)
		msg_p->route[i] = kvs_get_u32(reader);
	kvs_get_text(reader, &msg_p->why);
	msg_p->layout = kvs_get_layout(reader, text);
	if (msg_p->layout == NULL)
		return false;
	if (whole(reader, "welcome", text))
		return true;
	kvs_layout_free(msg_p->layout);
	msg_p->layout = NULL;
	return false;
}

bool kvs_get_refuse(struct kvs_reader *reader, struct kvs_text *why_p, struct kvs_text *text)
{
	kvs_get_text(reader, why_p);
	return whole(reader, "refuse", text);
}

void kvs_put_pull(struct kvs_writer *writer, const struct kvs_msg_pull *msg)
{
	kvs_put_u64(writer, msg->request);
	kvs_put_u64(writer, msg->room);
	kvs_put_u64(writer, msg->generation);
	kvs_put_u32(writer, msg->prefill_rank);
	kvs_put_u32(writer, msg->chunk);
	kvs_put_u32(writer, msg->component);
	kvs_put_u32(writer, msg->src_count);
	kvs_put_u32(writer, msg->dst_count);
	kvs_put_u32(writer, msg->verify);
	kvs_put_u64(writer, msg->digest);
	kvs_put_bytes(writer, msg->src_items, (size_t)msg->src_count * sizeof(int32_t));
	kvs_put_bytes(writer, msg->dst_items, (size_t)msg->dst_count * sizeof(int32_t));
}

bool kvs_get_pull(struct kvs_reader *reader, struct kvs_msg_pull *msg_p, struct kvs_text *text)
{
	msg_p->src_items = NULL;
	msg_p->dst_items = NULL;
	msg_p->request = kvs_get_u64(reader);
	msg_p->room = kvs_get_u64(reader);
	msg_p->generation = kvs_get_u64(reader);
	msg_p->prefill_rank = kvs_get_u32(reader);
	msg_p->chunk = kvs_get_u32(reader);
	msg_p->component = kvs_get_u32(reader);
	msg_p->src_count = kvs_get_u32(reader);
	msg_p->dst_count = kvs_get_u32(reader);
	msg_p->verify = kvs_get_u32(reader);
	msg_p->digest = kvs_get_u64(reader);
	uint64_t count = (uint64_t)msg_p->src_count + msg_p->dst_count;
	if (!reader->failed && (msg_p->src_count > KVS_WIRE_ITEMS_MAX || msg_p->dst_count > KVS_WIRE_ITEMS_MAX ||
	                        count * sizeof(int32_t) != reader->left)) {
		kvs_text_set(text, "pull message with lists of %u and %u items in %zu bytes", msg_p->src_count,
		             msg_p->dst_count, reader->left);
		return false;
	}
	if (reader->failed)
		return whole(reader, "pull", text);
	size_t size = (size_t)count * sizeof(int32_t);
	int32_t *items = malloc(size > 0 ? size : 1);
	if (items == NULL) {
		kvs_text_set(text, "out of memory");
		return false;
	}
	kvs_get_bytes(reader, items, size);
	msg_p->src_items = items;
	msg_p->dst_items = items + msg_p->src_count;
	return true;
}

void kvs_put_go(struct kvs_writer *writer, const struct kvs_msg_go *msg)
{
	kvs_put_u64(writer, msg->request);
	kvs_put_u64(writer, msg->stream);
	kvs_put_u64(writer, msg->bytes);
	kvs_put_u32(writer, msg->transport);
}

bool kvs_get_go(struct kvs_reader *reader, struct kvs_msg_go *msg_p, struct kvs_text *text)
{
	msg_p->request = kvs_get_u64(reader);
	msg_p->stream = kvs_get_u64(reader);
	msg_p->bytes = kvs_get_u64(reader);
	msg_p->transport = kvs_get_u32(reader);
	return whole(reader, "go", text);
}

void kvs_put_end(struct kvs_writer *writer, uint64_t request, uint64_t number, const char *text)
{
	kvs_put_u64(writer, request);
	kvs_put_u64(writer, number);
	kvs_put_string(writer, text);
}

bool kvs_get_end(struct kvs_reader *reader, struct kvs_msg_end *msg_p, struct kvs_text *text)
{
	msg_p->request = kvs_get_u64(reader);
	msg_p->number = kvs_get_u64(reader);
	kvs_get_text(reader, &msg_p->text);
	return whole(reader, "done, cancel or route-failed", text);
}

void kvs_put_fail(struct kvs_writer *writer, uint64_t room, uint64_t generation, const char *text)
{
	kvs_put_u64(writer, room);
	kvs_put_u64(writer, generation);
	kvs_put_string(writer, text);
}

bool kvs_get_fail(struct kvs_reader *reader, struct kvs_msg_fail *msg_p, struct kvs_text *text)
{
	msg_p->room = kvs_get_u64(reader);
	msg_p->generation = kvs_get_u64(reader);
	kvs_get_text(reader, &msg_p->text);
	return whole(reader, "fail", text);
}

void kvs_put_data(struct kvs_writer *writer, const struct kvs_msg_data *msg)
{
	kvs_put_bytes(writer, msg->token, sizeof(msg->token));
	kvs_put_u64(writer, msg->stream);
}

bool kvs_get_data(struct kvs_reader *reader, struct kvs_msg_data *msg_p, struct kvs_text *text)
{
	kvs_get_bytes(reader, msg_p->token, sizeof(msg_p->token));
	msg_p->stream = kvs_get_u64(reader);
	return whole(reader, "data", text);
}
