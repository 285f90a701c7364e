/* SPDX-License-Identifier: Apache-2.0 */
/*
 * READs: cut from the plan, posted in chains of which only the last asks for a completion, and collected. A READ is one
 * contiguous range at the prefill and a list of places here.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <string.h>

#include "log.h"
#include "rdma.h"

#define CHAIN        16u
#define READ_MAX     (256u << 10) /* bytes: longer ones are no faster and close a room later */
#define WINDOW_BYTES (4u << 20)   /* in flight: enough for 100 Gbit/s over 300 us */
#define STALL_NS     5000000000u  /* far above what seven repetitions take */

uint32_t kvs_rdma_direct_min = 4096;

uint32_t kvs_rdma_outstanding(const struct kvs_rdma *rdma)
{
	return (uint32_t)(rdma->reader.posted - rdma->reader.retired);
}

bool kvs_rdma_packs(const struct kvs_plan *plan, uint32_t sge, uint32_t slot_size)
{
	uint64_t direct = 0, packed = 0;
	if (slot_size == 0)
		return false;
	for (uint32_t i = 0; i < plan->copy_count; i++) {
		const struct kvs_copy *copy = &plan->copies[i];
		uint64_t item = copy->block_len * copy->block_count;
		uint64_t places = copy->dst_block_stride == copy->block_len ? 1 : copy->block_count;
		uint64_t lists = (places + sge - 1) / sge;
		bool contiguous = copy->block_count == 1 || copy->src_block_stride == copy->block_len;
		direct += (uint64_t)plan->pair_count * (contiguous ? lists : copy->block_count);
		/* Packed, neighbouring items share a READ. */
		uint64_t lists_packed = ((uint64_t)plan->pair_count * places + sge - 1) / sge;
		uint64_t slots = ((uint64_t)plan->pair_count * item + slot_size - 1) / slot_size;
		packed += lists_packed > slots ? lists_packed : slots;
	}
	return direct > 0 && plan->bytes / direct < kvs_rdma_direct_min && packed * 2 <= direct;
}

/* ---- cutting ---- */

struct post {
	struct kvs_ibv_send_wr wr[CHAIN];
	struct kvs_ibv_sge sge[CHAIN][KVS_RDMA_SGE_MAX];
};

enum cut {
	CUT_OK,
	CUT_NONE,    /* nothing to cut now */
	CUT_OUTSIDE, /* not registered; text */
};

/* Where the run's next byte is at the prefill, and how many can be read from there in one go. */
static bool source(const struct kvs_rdma *rdma, uint32_t component, uint32_t *hint, uint64_t *address_p,
                   uint32_t *key_p, uint64_t *room_p, struct kvs_text *text)
{
	const struct kvs_rdma_reader *reader = &rdma->reader;
	const struct kvs_rdma_ready *ready = &rdma->ready;
	if (reader->packed) {
		uint64_t in_slot = reader->issued % ready->slot_size;
		*address_p = ready->slots_address +
		             reader->issued / ready->slot_size % ready->slot_count * ready->slot_size + in_slot;
		*key_p = ready->slots_key;
		*room_p = ready->slot_size - in_slot;
		return true;
	}
	*address_p = ready->tensors[rdma->tensor_first[component] + reader->run.src_tensor] + reader->run.src;
	const struct kvs_rdma_piece *piece = kvs_rdma_find(&ready->pieces, *address_p, hint);
	if (piece == NULL) {
		kvs_text_set(text, "the prefill registered no memory at 0x%" PRIx64 " (component %u, tensor %u)",
		             *address_p, component, reader->run.src_tensor);
		return false;
	}
	*key_p = piece->key;
	*room_p = piece->length - (*address_p - piece->address);
	return true;
}

/* May the byte at issued be read now? */
static bool is_packed(const struct kvs_rdma *rdma)
{
	const struct kvs_rdma_reader *reader = &rdma->reader;
	return !reader->packed || reader->issued / rdma->ready.slot_size < reader->packed_pieces;
}

static bool next_run(struct kvs_rdma_reader *reader)
{
	return reader->run.len > 0 || kvs_plan_next(&reader->iter, READ_MAX, &reader->run);
}

/* One READ. */
static enum cut cut_read(struct kvs_rdma *rdma, uint32_t component, struct kvs_ibv_send_wr *wr, struct kvs_ibv_sge *sge,
                         struct kvs_text *text)
{
	struct kvs_rdma_reader *reader = &rdma->reader;
	uint64_t end = 0, total = 0, limit = READ_MAX;
	uint32_t port_limit = rdma->local.ports[rdma->match.local_port].max_message;
	limit = port_limit > 0 && port_limit < limit ? port_limit : limit;
	memset(wr, 0, sizeof(*wr));
	while (total < limit && is_packed(rdma) && next_run(reader)) {
		struct kvs_run *run = &reader->run;
		uint64_t address, room, here_room;
		uint32_t key;
		if (!source(rdma, component, &reader->remote_hint, &address, &key, &room, text))
			return CUT_OUTSIDE;
		if (total > 0 && (address != end || key != wr->rdma.rkey))
			break;
		const struct kvs_rdma_piece *here = kvs_rdma_find(&rdma->memory->pieces, run->dst, &reader->local_hint);
		if (here == NULL) {
			kvs_text_set(text, "no memory is registered here at 0x%" PRIx64, run->dst);
			return CUT_OUTSIDE;
		}
		here_room = here->length - (run->dst - here->address);
		uint64_t length = run->len < room ? run->len : room;
		length = length < here_room ? length : here_room;
		length = length < limit - total ? length : limit - total;
		struct kvs_ibv_sge *last = wr->num_sge > 0 ? &sge[wr->num_sge - 1] : NULL;
		if (last != NULL && last->addr + last->length == run->dst && last->lkey == here->key) {
			last->length += (uint32_t)length;
		} else if ((uint32_t)wr->num_sge == rdma->pair.sge) {
			break;
		} else {
			sge[wr->num_sge++] = (struct kvs_ibv_sge){run->dst, (uint32_t)length, here->key};
		}
		if (total == 0) {
			wr->rdma.remote_addr = address;
			wr->rdma.rkey = key;
		}
		total += length;
		end = address + length;
		run->src += length;
		run->dst += length;
		run->len -= length;
		reader->issued += length;
	}
	if (total == 0)
		return CUT_NONE;
	reader->posted++;
	reader->in_flight += total;
	reader->reads[reader->posted % KVS_RDMA_DEPTH] =
	        (struct kvs_rdma_read){.address = wr->rdma.remote_addr, .bytes = total};
	wr->wr_id = reader->posted;
	wr->sg_list = sge;
	wr->opcode = KVS_IBV_WR_RDMA_READ;
	return CUT_OK;
}

/* ---- posting ---- */

/* As much as the queue and the window take. False with text. */
static bool post_some(struct kvs_link *link, const struct kvs_sink *sink, bool *posted_p, struct kvs_text *text)
{
	struct kvs_rdma *rdma = link->rdma;
	struct kvs_rdma_reader *reader = &rdma->reader;
	struct post post;
	uint32_t room = rdma->pair.depth - kvs_rdma_outstanding(rdma), count = 0;
	/* Long chains are what makes completions rare: wait until there is room for one. */
	uint32_t least = rdma->pair.depth < 4 * CHAIN ? (rdma->pair.depth + 3) / 4 : CHAIN;
	if (room < least || reader->in_flight >= WINDOW_BYTES || reader->issued == sink->plan->bytes)
		return true;
	room = room < CHAIN ? room : CHAIN;
	enum cut cut = CUT_OK;
	while (count < room && reader->in_flight < WINDOW_BYTES) {
		cut = cut_read(rdma, sink->component, &post.wr[count], post.sge[count], text);
		if (cut != CUT_OK)
			break;
		if (count > 0)
			post.wr[count - 1].next = &post.wr[count];
		count++;
	}
	if (count > 0) {
		struct kvs_ibv_send_wr *bad = NULL;
		post.wr[count - 1].send_flags = KVS_IBV_SEND_SIGNALED;
		int error = kvs_verbs_post_send(rdma->pair.qp, post.wr, &bad);
		if (error != 0) {
			kvs_text_set(text, "%s: ibv_post_send: %s", rdma->pair.device->name, strerror(error));
			return false;
		}
		*posted_p = true;
	}
	return cut != CUT_OUTSIDE;
}

/* ---- collecting ---- */

static void describe(const struct kvs_link *link, const struct kvs_ibv_wc *wc, struct kvs_text *text)
{
	const struct kvs_rdma *rdma = link->rdma;
	const struct kvs_rdma_read *read = &rdma->reader.reads[wc->wr_id % KVS_RDMA_DEPTH];
	kvs_text_set(text, "%s: READ of %" PRIu64 " bytes at 0x%" PRIx64 " of %.150s: %s (status %d, vendor 0x%x)",
	             rdma->pair.device->name, read->bytes, read->address, link->name,
	             rdma->pair.device->verbs->wc_status_str(wc->status), wc->status, wc->vendor_err);
}

static int poll(struct kvs_rdma *rdma, struct kvs_ibv_wc *wc)
{
	struct kvs_rdma_reader *reader = &rdma->reader;
	if (reader->has_early) {
		*wc = reader->early;
		reader->has_early = false;
		return 1;
	}
	return kvs_verbs_poll_cq(rdma->pair.cq, 1, wc);
}

bool kvs_rdma_peek(struct kvs_rdma *rdma)
{
	struct kvs_rdma_reader *reader = &rdma->reader;
	if (!reader->has_early && rdma->pair.cq != NULL)
		reader->has_early = kvs_verbs_poll_cq(rdma->pair.cq, 1, &reader->early) > 0;
	return reader->has_early;
}

/* What has completed: bytes in place. False with text. */
static bool collect(struct kvs_link *link, struct kvs_sink *sink, bool *moved_p, struct kvs_text *text)
{
	struct kvs_rdma *rdma = link->rdma;
	struct kvs_rdma_reader *reader = &rdma->reader;
	struct kvs_ibv_wc wc;
	int count;
	while ((count = poll(rdma, &wc)) > 0) {
		/* In the order of posting: one says that those before it are complete too. */
		bool known = wc.wr_id > reader->retired && wc.wr_id <= reader->posted;
		if (wc.status != KVS_IBV_WC_SUCCESS || !known) {
			describe(link, &wc, text);
			return false;
		}
		for (; reader->retired < wc.wr_id; reader->retired++) {
			uint64_t bytes = reader->reads[(reader->retired + 1) % KVS_RDMA_DEPTH].bytes;
			reader->in_flight -= bytes;
			sink->position += bytes;
		}
		*moved_p = true;
	}
	if (count == 0)
		return true;
	kvs_text_set(text, "%s: ibv_poll_cq failed", rdma->pair.device->name);
	return false;
}

/* ---- the stream ---- */

/* Tell the prefill how many pieces it may pack: those in slots that have been read are free again. */
static void give_credit(struct kvs_link *link, const struct kvs_sink *sink, bool first)
{
	struct kvs_rdma *rdma = link->rdma;
	struct kvs_rdma_reader *reader = &rdma->reader;
	struct kvs_rdma_credit msg = {.stream = sink->stream, .direct = reader->packed ? 0 : 1};
	if (!reader->packed && !first)
		return;
	if (reader->packed) {
		uint64_t taken = sink->position / rdma->ready.slot_size;
		msg.pieces = taken + rdma->ready.slot_count;
		/* A message for each quarter of the slots. */
		if (!first && msg.pieces < reader->credit + (rdma->ready.slot_count + 3) / 4)
			return;
		reader->credit = msg.pieces;
	}
	struct kvs_writer body = {.data = NULL};
	kvs_put_rdma_credit(&body, &msg);
	kvs_lock();
	kvs_link_send(link, KVS_MESSAGE_RDMA_CREDIT, &body, NULL, 0);
	kvs_unlock();
}

static void start(struct kvs_link *link, const struct kvs_sink *sink)
{
	struct kvs_rdma *rdma = link->rdma;
	struct kvs_rdma_reader *reader = &rdma->reader;
	reader->stream = sink->stream;
	reader->first = reader->posted;
	reader->issued = 0;
	reader->packed_pieces = 0;
	reader->run.len = 0;
	reader->packed = kvs_rdma_packs(sink->plan, rdma->pair.sge, rdma->ready.slot_size);
	kvs_plan_seek(&reader->iter, sink->plan, 0);
	kvs_lock();
	uint64_t timeout_ns = (uint64_t)kvs_config_get()->timeout_ms * 1000000U;
	kvs_unlock();
	reader->stall_ns = timeout_ns / 4 < STALL_NS ? timeout_ns / 4 : STALL_NS;
	give_credit(link, sink, true);
}

/*
 * A device should end a READ that is not answered by itself, and not all do. While there is time, another transport can
 * still carry the request.
 */
static bool is_stalled(const struct kvs_link *link, struct kvs_text *text)
{
	const struct kvs_rdma *rdma = link->rdma;
	const struct kvs_rdma_reader *reader = &rdma->reader;
	uint64_t waited = kvs_now_ns() - reader->moved_ns;
	if (link->route_count < 2 || kvs_rdma_outstanding(rdma) == 0 || waited < reader->stall_ns)
		return false;
	kvs_text_set(text, "%s: none of %u READs from %.150s has ended for %u ms", rdma->pair.device->name,
	             kvs_rdma_outstanding(rdma), link->name, (unsigned)(waited / 1000000U));
	return true;
}

enum kvs_step kvs_rdma_read_more(struct kvs_link *link, struct kvs_sink *sink, struct kvs_text *text)
{
	struct kvs_rdma *rdma = link->rdma;
	bool moved = false;
	if (rdma->reader.stream != sink->stream)
		start(link, sink);
	bool fatal = atomic_load(&rdma->pair.device->fatal);
	if (fatal)
		kvs_text_set(text, "device %s has reported a fatal error", rdma->pair.device->name);
	bool well = !fatal && collect(link, sink, &moved, text) && post_some(link, sink, &moved, text);
	if (moved)
		rdma->reader.moved_ns = kvs_now_ns();
	if (!well || (!moved && is_stalled(link, text))) {
		rdma->reader.error = *text;
		return KVS_STEP_FAILED;
	}
	if (sink->position == sink->plan->bytes) {
		if (rdma->memory->flush && !kvs_rdma_gpu_flush(link->endpoint->cuda, text)) {
			rdma->reader.error = *text;
			return KVS_STEP_FAILED;
		}
		rdma->failures = 0;
		kvs_log(KVS_LOG_DEBUG, "%s: %" PRIu64 " READs, %s, for %" PRIu64 " bytes", link->name,
		        rdma->reader.posted - rdma->reader.first, rdma->reader.packed ? "packed" : "direct",
		        sink->plan->bytes);
		return KVS_STEP_DONE;
	}
	give_credit(link, sink, false);
	return moved ? KVS_STEP_PROGRESS : KVS_STEP_IDLE;
}
