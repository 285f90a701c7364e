/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the setup thread does: register memory, make a pair, tell the other end, connect. The lock held, released while
 * it works; the link is held by the caller.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>

#include "log.h"
#include "rdma.h"

/* May messages still be sent for it? */
static bool is_alive(const struct kvs_link *link)
{
	return link->state == KVS_LINK_READY && !link->drop && kvs_link_find(link->id) == link;
}

/* Memory registered and a new pair made. The lock held, released meanwhile. False with text. */
static bool prepare(struct kvs_link *link, const struct kvs_rdma_port *port, bool reader, struct kvs_text *text)
{
	struct kvs_rdma *rdma = link->rdma;
	struct kvs_rdma_memory *memory = rdma->memory, *before = NULL;
	struct kvs_cuda_memory *gpu = link->endpoint->cuda;
	if (memory == NULL || kvs_rdma_is_stale(link)) {
		memory = kvs_rdma_memory_get(link->endpoint, port->device);
		if (memory == NULL) {
			kvs_text_set(text, "out of memory");
			return false;
		}
		before = rdma->memory;
		rdma->memory = memory;
	}
	struct kvs_rdma_pair old = rdma->pair, made = {.device = NULL};
	rdma->pair = made;
	bool registered = memory->registered;
	kvs_unlock();
	kvs_rdma_pair_destroy(&old);
	int access = reader ? KVS_IBV_ACCESS_LOCAL_WRITE : KVS_IBV_ACCESS_REMOTE_READ;
	bool ok = (gpu == NULL || !reader || kvs_rdma_gpu_ordered(gpu, &memory->flush, text)) &&
	          (registered ||
	           kvs_rdma_register(port->device, link->endpoint->layout, gpu, access, &memory->pieces, text)) &&
	          kvs_rdma_pair_make(&made, port, reader, text);
	kvs_lock();
	memory->registered = registered || memory->pieces.count > 0;
	rdma->pair = made;
	kvs_rdma_memory_put(before);
	kvs_rdma_memory_release();
	return ok;
}

void kvs_rdma_do_begin(struct kvs_link *link)
{
	struct kvs_rdma *rdma = link->rdma;
	const struct kvs_rdma_port *port = &rdma->local.ports[rdma->match.local_port];
	const struct kvs_rdma_port *remote = &rdma->remote.ports[rdma->match.remote_port];
	struct kvs_text text = {.s = ""};
	bool prepared = prepare(link, port, true, &text);
	if (!is_alive(link))
		return; /* what was made goes with it */
	if (!prepared) {
		kvs_rdma_give_up(link, text.s);
		return;
	}
	if (!kvs_watch_add(rdma->pair.channel->fd, EPOLLIN, KVS_WATCH_RDMA, link->id)) {
		kvs_text_set(&text, "epoll: %m");
		kvs_rdma_give_up(link, text.s);
		return;
	}
	int initiator = port->device->attr.max_qp_init_rd_atom;
	uint32_t depth = initiator > 0 ? (uint32_t)initiator : 1;
	depth = remote->rd_atom > 0 && remote->rd_atom < depth ? remote->rd_atom : depth;
	struct kvs_rdma_connect msg = {
	        .attempt = rdma->attempt,
	        .port = rdma->match.remote_port,
	        .gid = rdma->match.remote_gid,
	        .lid = port->lid,
	        .mtu = port->mtu < remote->mtu ? port->mtu : remote->mtu,
	        .rd_atom = depth < UINT8_MAX ? depth : UINT8_MAX,
	        .qp = rdma->pair.qp->qp_num,
	        .psn = rdma->pair.psn,
	};
	memcpy(msg.raw_gid, port->gids[rdma->match.local_gid].raw, sizeof(msg.raw_gid));
	struct kvs_writer body = {.data = NULL};
	kvs_put_rdma_connect(&body, &msg);
	kvs_link_send(link, KVS_MESSAGE_RDMA_CONNECT, &body, NULL, 0);
}

/* Does this link ever slice whole source items apart? Only then are slots of use. */
static bool needs_slots(const struct kvs_link *link)
{
	for (uint32_t c = 0; c < link->endpoint->layout->component_count; c++) {
		if (link->verdicts[c].action == KVS_ACT_SLICE &&
		    link->endpoint->layout->tp_size < link->peer_layout->tp_size)
			return true;
	}
	return false;
}

/* The lock held, released meanwhile. */
static bool make_slots(struct kvs_link *link, struct kvs_text *text)
{
	struct kvs_rdma *rdma = link->rdma;
	const struct kvs_rdma_device *device = rdma->memory->device;
	uint64_t count = kvs_config_get()->staging_bytes / KVS_RDMA_SLOT_SIZE;
	if (rdma->slots != NULL || !needs_slots(link))
		return true;
	count = count < 2 ? 2 : count;
	count = count > KVS_RDMA_SLOTS ? KVS_RDMA_SLOTS : count;
	size_t size = (size_t)count * KVS_RDMA_SLOT_SIZE;
	kvs_unlock();
	void *slots = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct kvs_ibv_mr *mr = NULL;
	if (slots == MAP_FAILED) {
		kvs_text_set(text, "%zu bytes of staging memory: %m", size);
	} else {
		/* A forked child must not take these pages from under the device; it has no use for them either. */
		(void)madvise(slots, size, MADV_DONTFORK);
		errno = EIO;
		mr = device->verbs->reg_mr(device->pd, slots, size, KVS_IBV_ACCESS_REMOTE_READ);
		if (mr == NULL) {
			kvs_rdma_register_error(text, (uint64_t)(uintptr_t)slots, size, errno);
			munmap(slots, size);
		}
	}
	kvs_lock();
	if (mr == NULL)
		return false;
	rdma->slots = slots;
	rdma->slots_mr = mr;
	rdma->slot_count = (uint32_t)count;
	return true;
}

/* Addresses of all tensors, one after the other. */
static bool list_tensors(const struct kvs_layout *layout, struct kvs_rdma_ready *msg)
{
	size_t count = 0;
	for (uint32_t c = 0; c < layout->component_count; c++)
		count += layout->components[c].tensor_count;
	msg->tensors = calloc(count + 1, sizeof(*msg->tensors));
	if (msg->tensors == NULL)
		return false;
	for (uint32_t c = 0; c < layout->component_count; c++) {
		for (uint32_t t = 0; t < layout->components[c].tensor_count; t++)
			msg->tensors[msg->tensor_count++] = layout->components[c].tensors[t].address;
	}
	return true;
}

static bool accept_pair(struct kvs_link *link, const struct kvs_rdma_connect *msg, struct kvs_rdma_ready *answer,
                        struct kvs_text *text)
{
	struct kvs_rdma *rdma = link->rdma;
	if (msg->port >= rdma->local.port_count || msg->gid >= rdma->local.ports[msg->port].gid_count) {
		kvs_text_set(text, "port %u GID %u was not offered", msg->port, msg->gid);
		return false;
	}
	const struct kvs_rdma_port *port = &rdma->local.ports[msg->port];
	if (rdma->memory != NULL && rdma->memory->device != port->device) {
		kvs_text_set(text, "the port is of another device than before");
		return false;
	}
	struct kvs_rdma_path path = {.port = port,
	                             .gid = msg->gid,
	                             .lid = msg->lid,
	                             .raw_gid = msg->raw_gid,
	                             .qp = msg->qp,
	                             .psn = msg->psn,
	                             .mtu = msg->mtu,
	                             .rd_atom = msg->rd_atom < port->rd_atom ? msg->rd_atom : port->rd_atom,
	                             .service_level = kvs_config_get()->rdma_service_level,
	                             .traffic_class = kvs_config_get()->rdma_traffic_class};
	if (!prepare(link, port, false, text) || !make_slots(link, text))
		return false;
	kvs_unlock();
	bool ok = kvs_rdma_pair_connect(&rdma->pair, &path, false, text);
	kvs_lock();
	if (!ok)
		return false;
	answer->qp = rdma->pair.qp->qp_num;
	answer->psn = rdma->pair.psn;
	answer->rd_atom = path.rd_atom;
	if (rdma->slots != NULL) {
		answer->slot_count = rdma->slot_count;
		answer->slot_size = KVS_RDMA_SLOT_SIZE;
		answer->slots_address = (uint64_t)(uintptr_t)rdma->slots;
		answer->slots_key = rdma->slots_mr->rkey;
	}
	answer->pieces = rdma->memory->pieces; /* for the encoder only */
	return list_tensors(link->endpoint->layout, answer);
}

void kvs_rdma_do_accept(struct kvs_link *link, const struct kvs_rdma_connect *msg)
{
	struct kvs_rdma_ready answer = {.attempt = msg->attempt};
	struct kvs_writer body = {.data = NULL};
	answer.ok = accept_pair(link, msg, &answer, &answer.text) ? 1 : 0;
	if (!is_alive(link)) {
		free(answer.tensors);
		return;
	}
	if (answer.ok == 0) {
		answer.pieces = (struct kvs_rdma_pieces){.count = 0};
		kvs_text_set(&link->rdma->text, "%s", answer.text.s);
		kvs_log(KVS_LOG_WARN, "%s: rdma cannot be used: %s", link->name, answer.text.s);
	}
	kvs_put_rdma_ready(&body, &answer);
	kvs_link_send(link, KVS_MESSAGE_RDMA_READY, &body, NULL, 0);
	free(answer.tensors);
}

/* Its tensors must be those of its layout. */
static bool index_tensors(struct kvs_rdma *rdma, const struct kvs_layout *peer, uint32_t tensor_count)
{
	uint32_t count = 0;
	if (rdma->tensor_first == NULL)
		rdma->tensor_first = calloc((size_t)peer->component_count + 1, sizeof(*rdma->tensor_first));
	if (rdma->tensor_first == NULL)
		return false;
	for (uint32_t c = 0; c < peer->component_count; c++) {
		rdma->tensor_first[c] = count;
		count += peer->components[c].tensor_count;
	}
	return count == tensor_count;
}

void kvs_rdma_do_finish(struct kvs_link *link, struct kvs_rdma_ready *msg)
{
	struct kvs_rdma *rdma = link->rdma;
	struct kvs_text text = {.s = ""};
	const struct kvs_rdma_port *port = &rdma->local.ports[rdma->match.local_port];
	const struct kvs_rdma_port *remote = &rdma->remote.ports[rdma->match.remote_port];
	if (msg->attempt != rdma->attempt || rdma->state != KVS_RDMA_SETUP || rdma->pair.qp == NULL)
		return; /* of an attempt that is over */
	if (msg->ok == 0 || !index_tensors(rdma, link->peer_layout, msg->tensor_count)) {
		kvs_text_set(&text, "at the prefill: %.400s",
		             msg->ok == 0 ? msg->text.s : "its table of tensors is not that of its layout");
		kvs_rdma_give_up(link, text.s);
		return;
	}
	int initiator = port->device->attr.max_qp_init_rd_atom;
	struct kvs_rdma_path path = {.port = port,
	                             .gid = rdma->match.local_gid,
	                             .lid = remote->lid,
	                             .raw_gid = remote->gids[rdma->match.remote_gid].raw,
	                             .qp = msg->qp,
	                             .psn = msg->psn,
	                             .mtu = port->mtu < remote->mtu ? port->mtu : remote->mtu,
	                             .rd_atom = msg->rd_atom,
	                             .service_level = kvs_config_get()->rdma_service_level,
	                             .traffic_class = kvs_config_get()->rdma_traffic_class};
	if (initiator > 0 && path.rd_atom > (uint32_t)initiator)
		path.rd_atom = (uint32_t)initiator;
	kvs_unlock();
	bool ok = kvs_rdma_pair_connect(&rdma->pair, &path, true, &text);
	kvs_lock();
	if (!is_alive(link))
		return;
	if (!ok) {
		kvs_rdma_give_up(link, text.s);
		return;
	}
	kvs_rdma_ready_free(&rdma->ready);
	rdma->ready = *msg;
	*msg = (struct kvs_rdma_ready){.attempt = 0};
	rdma->state = KVS_RDMA_UP;
	kvs_rdma_place(link, true);
	kvs_log(KVS_LOG_INFO,
	        "%s: rdma is up: %s port %u, GID index %u, MTU %u, depth %u, scatter %u, %u READs at a time, %u "
	        "regions",
	        link->name, port->device->name, port->number, port->gids[path.gid].index, 128U << path.mtu,
	        rdma->pair.depth, rdma->pair.sge, path.rd_atom, rdma->memory->pieces.count);
	kvs_agent_wake();
}
