/* SPDX-License-Identifier: Apache-2.0 */
#include "rdma_wire.h"

#include <stdlib.h>
#include <string.h>

#define TENSOR_BYTES sizeof(uint64_t)
#define PIECE_BYTES  (2 * sizeof(uint64_t) + sizeof(uint32_t))

static bool whole(const struct kvs_reader *reader, const char *name, struct kvs_text *text)
{
	if (!reader->failed && reader->left == 0)
		return true;
	kvs_text_set(text, "%s message %s", name, reader->failed ? "cut off" : "with bytes too many");
	return false;
}

void kvs_put_rdma_connect(struct kvs_writer *writer, const struct kvs_rdma_connect *msg)
{
	kvs_put_u64(writer, msg->attempt);
	kvs_put_u32(writer, msg->port);
	kvs_put_u32(writer, msg->gid);
	kvs_put_u32(writer, msg->lid);
	kvs_put_u32(writer, msg->mtu);
	kvs_put_u32(writer, msg->rd_atom);
	kvs_put_u32(writer, msg->qp);
	kvs_put_u32(writer, msg->psn);
	kvs_put_bytes(writer, msg->raw_gid, sizeof(msg->raw_gid));
}

bool kvs_get_rdma_connect(struct kvs_reader *reader, struct kvs_rdma_connect *msg_p, struct kvs_text *text)
{
	msg_p->attempt = kvs_get_u64(reader);
	msg_p->port = kvs_get_u32(reader);
	msg_p->gid = kvs_get_u32(reader);
	msg_p->lid = kvs_get_u32(reader);
	msg_p->mtu = kvs_get_u32(reader);
	msg_p->rd_atom = kvs_get_u32(reader);
	msg_p->qp = kvs_get_u32(reader);
	msg_p->psn = kvs_get_u32(reader);
	kvs_get_bytes(reader, msg_p->raw_gid, sizeof(msg_p->raw_gid));
	if (!whole(reader, "rdma-connect", text))
		return false;
	if (msg_p->mtu >= 1 && msg_p->mtu <= 5 && msg_p->rd_atom >= 1 && msg_p->rd_atom <= UINT8_MAX)
		return true;
	kvs_text_set(text, "rdma-connect message with MTU code %u and %u outstanding READs", msg_p->mtu,
	             msg_p->rd_atom);
	return false;
}

void kvs_put_rdma_ready(struct kvs_writer *writer, const struct kvs_rdma_ready *msg)
{
	kvs_put_u64(writer, msg->attempt);
	kvs_put_u32(writer, msg->ok);
	kvs_put_u32(writer, msg->qp);
	kvs_put_u32(writer, msg->psn);
	kvs_put_u32(writer, msg->rd_atom);
	kvs_put_string(writer, msg->text.s);
	kvs_put_u32(writer, msg->slot_count);
	kvs_put_u32(writer, msg->slot_size);
	kvs_put_u64(writer, msg->slots_address);
	kvs_put_u32(writer, msg->slots_key);
	kvs_put_u32(writer, msg->tensor_count);
	for (uint32_t i = 0; i < msg->tensor_count; i++)
		kvs_put_u64(writer, msg->tensors[i]);
	kvs_put_u32(writer, msg->pieces.count);
	for (uint32_t i = 0; i < msg->pieces.count; i++) {
		kvs_put_u64(writer, msg->pieces.pieces[i].address);
		kvs_put_u64(writer, msg->pieces.pieces[i].length);
		kvs_put_u32(writer, msg->pieces.pieces[i].key);
	}
}

/* Sorted, not overlapping, no wrap: what kvs_rdma_find relies on. */
static bool pieces_are_sane(const struct kvs_rdma_pieces *pieces)
{
	uint64_t end = 0;
	for (uint32_t i = 0; i < pieces->count; i++) {
		const struct kvs_rdma_piece *piece = &pieces->pieces[i];
		if (piece->length == 0 || piece->address < end || piece->address + piece->length < piece->address)
			return false;
		end = piece->address + piece->length;
	}
	return true;
}

static bool get_tables(struct kvs_reader *reader, struct kvs_rdma_ready *msg_p, struct kvs_text *text)
{
	msg_p->tensor_count = kvs_get_u32(reader);
	/* No more is allocated than the message holds. */
	if (reader->failed || msg_p->tensor_count > reader->left / TENSOR_BYTES)
		goto cut_off;
	msg_p->tensors = calloc((size_t)msg_p->tensor_count + 1, sizeof(*msg_p->tensors));
	if (msg_p->tensors == NULL)
		goto no_memory;
	for (uint32_t i = 0; i < msg_p->tensor_count; i++)
		msg_p->tensors[i] = kvs_get_u64(reader);
	uint32_t count = kvs_get_u32(reader);
	if (reader->failed || count > reader->left / PIECE_BYTES)
		goto cut_off;
	msg_p->pieces.pieces = calloc((size_t)count + 1, sizeof(*msg_p->pieces.pieces));
	if (msg_p->pieces.pieces == NULL)
		goto no_memory;
	msg_p->pieces.count = count;
	for (uint32_t i = 0; i < count; i++) {
		msg_p->pieces.pieces[i].address = kvs_get_u64(reader);
		msg_p->pieces.pieces[i].length = kvs_get_u64(reader);
		msg_p->pieces.pieces[i].key = kvs_get_u32(reader);
	}
	return whole(reader, "rdma-ready", text);
cut_off:
	kvs_text_set(text, "rdma-ready message cut off");
	return false;
no_memory:
	kvs_text_set(text, "out of memory");
	return false;
}

bool kvs_get_rdma_ready(struct kvs_reader *reader, struct kvs_rdma_ready *msg_p, struct kvs_text *text)
{
	memset(msg_p, 0, sizeof(*msg_p));
	msg_p->attempt = kvs_get_u64(reader);
	msg_p->ok = kvs_get_u32(reader);
	msg_p->qp = kvs_get_u32(reader);
	msg_p->psn = kvs_get_u32(reader);
	msg_p->rd_atom = kvs_get_u32(reader);
	kvs_get_text(reader, &msg_p->text);
	msg_p->slot_count = kvs_get_u32(reader);
	msg_p->slot_size = kvs_get_u32(reader);
	msg_p->slots_address = kvs_get_u64(reader);
	msg_p->slots_key = kvs_get_u32(reader);
	if (!get_tables(reader, msg_p, text)) {
		kvs_rdma_ready_free(msg_p);
		return false;
	}
	bool slots = msg_p->slot_count <= KVS_RDMA_SLOTS_MAX && msg_p->slot_size <= KVS_RDMA_SLOT_MAX &&
	             (msg_p->slot_count == 0) == (msg_p->slot_size == 0);
	if (slots && pieces_are_sane(&msg_p->pieces) &&
	    (msg_p->ok == 0 || (msg_p->rd_atom >= 1 && msg_p->rd_atom <= UINT8_MAX)))
		return true;
	kvs_text_set(text, "rdma-ready message that makes no sense (%u slots of %u bytes, %u READs, %u pieces)",
	             msg_p->slot_count, msg_p->slot_size, msg_p->rd_atom, msg_p->pieces.count);
	kvs_rdma_ready_free(msg_p);
	return false;
}

void kvs_rdma_ready_free(struct kvs_rdma_ready *msg)
{
	free(msg->tensors);
	free(msg->pieces.pieces);
	msg->tensors = NULL;
	msg->tensor_count = 0;
	msg->pieces = (struct kvs_rdma_pieces){.count = 0};
}

void kvs_put_rdma_credit(struct kvs_writer *writer, const struct kvs_rdma_credit *msg)
{
	kvs_put_u64(writer, msg->stream);
	kvs_put_u32(writer, msg->direct);
	kvs_put_u64(writer, msg->pieces);
}

bool kvs_get_rdma_credit(struct kvs_reader *reader, struct kvs_rdma_credit *msg_p, struct kvs_text *text)
{
	msg_p->stream = kvs_get_u64(reader);
	msg_p->direct = kvs_get_u32(reader);
	msg_p->pieces = kvs_get_u64(reader);
	return whole(reader, "rdma-credit", text);
}

void kvs_put_rdma_packed(struct kvs_writer *writer, const struct kvs_rdma_packed *msg)
{
	kvs_put_u64(writer, msg->stream);
	kvs_put_u64(writer, msg->pieces);
}

bool kvs_get_rdma_packed(struct kvs_reader *reader, struct kvs_rdma_packed *msg_p, struct kvs_text *text)
{
	msg_p->stream = kvs_get_u64(reader);
	msg_p->pieces = kvs_get_u64(reader);
	return whole(reader, "rdma-packed", text);
}
