/* SPDX-License-Identifier: Apache-2.0 */
/* Which ports and addresses of two hosts belong together, and how they are told to the other one. Pure. */
#include <string.h>

#include "rdma_device.h"

enum family {
	FAMILY_LINK_LOCAL = 1,
	FAMILY_GLOBAL = 2,
	FAMILY_IPV4 = 3, /* mapped */
};

static enum family family_of(const uint8_t raw[16])
{
	static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
	if (memcmp(raw, mapped, sizeof(mapped)) == 0)
		return FAMILY_IPV4;
	return raw[0] == 0xfe && (raw[1] & 0xc0) == 0x80 ? FAMILY_LINK_LOCAL : FAMILY_GLOBAL;
}

static int common_prefix(const uint8_t a[16], const uint8_t b[16])
{
	int bits = 0;
	for (int i = 0; i < 128 && ((a[i / 8] ^ b[i / 8]) & (0x80 >> i % 8)) == 0; i++)
		bits++;
	return bits;
}

/* Higher is better, 0: they cannot talk. */
static int score_gids(const struct kvs_rdma_gid *a, const struct kvs_rdma_gid *b, uint32_t link_layer)
{
	if (link_layer == KVS_IBV_LINK_LAYER_INFINIBAND)
		return 1 + common_prefix(a->raw, b->raw);
	enum family family = family_of(a->raw);
	if (a->type != b->type || family != family_of(b->raw))
		return 0;
	/* v1 has no IP header: such packets stay on their Ethernet segment. */
	int version = a->type == KVS_IBV_GID_TYPE_ROCE_V2 ? 10000 : 1;
	return version + 1000 * (int)family + common_prefix(a->raw, b->raw);
}

bool kvs_rdma_match(const struct kvs_rdma_offer *local, const struct kvs_rdma_offer *remote, int memory_node,
                    struct kvs_rdma_match *match_p, struct kvs_text *text)
{
	int best = 0;
	if (local->port_count == 0 || remote->port_count == 0) {
		kvs_text_set(text, "%s: %.400s", local->port_count == 0 ? "here" : "at the prefill",
		             local->port_count == 0 ? local->why.s : remote->why.s);
		return false;
	}
	for (uint32_t l = 0; l < local->port_count; l++) {
		const struct kvs_rdma_port *ours = &local->ports[l];
		int near = memory_node >= 0 && ours->device != NULL && ours->device->numa == memory_node ? 100000 : 0;
		for (uint32_t r = 0; r < remote->port_count; r++) {
			const struct kvs_rdma_port *theirs = &remote->ports[r];
			if (ours->link_layer != theirs->link_layer)
				continue;
			for (uint32_t i = 0; i < ours->gid_count * theirs->gid_count; i++) {
				uint32_t a = i / theirs->gid_count, b = i % theirs->gid_count;
				int score = score_gids(&ours->gids[a], &theirs->gids[b], ours->link_layer);
				if (score == 0 || score + near <= best)
					continue;
				best = score + near;
				*match_p = (struct kvs_rdma_match){l, a, r, b};
			}
		}
	}
	if (best == 0)
		kvs_text_set(text, "no RDMA address of the same kind at both ends (GID type and IP family; "
		                   "KVSPLICE_RDMA_DEVICE and KVSPLICE_RDMA_GID_INDEX choose)");
	return best > 0;
}

void kvs_put_rdma_offer(struct kvs_writer *writer, const struct kvs_rdma_offer *offer)
{
	kvs_put_u32(writer, offer->port_count);
	for (uint32_t p = 0; p < offer->port_count; p++) {
		const struct kvs_rdma_port *port = &offer->ports[p];
		kvs_put_u32(writer, port->link_layer);
		kvs_put_u32(writer, port->lid);
		kvs_put_u32(writer, port->mtu);
		kvs_put_u32(writer, port->max_message);
		kvs_put_u32(writer, port->rd_atom);
		kvs_put_u32(writer, port->gid_count);
		for (uint32_t g = 0; g < port->gid_count; g++) {
			kvs_put_bytes(writer, port->gids[g].raw, sizeof(port->gids[g].raw));
			kvs_put_u32(writer, port->gids[g].type);
		}
	}
	kvs_put_string(writer, offer->why.s);
}

void kvs_get_rdma_offer(struct kvs_reader *reader, struct kvs_rdma_offer *offer_p)
{
	memset(offer_p, 0, sizeof(*offer_p));
	uint32_t ports = kvs_get_u32(reader);
	if (ports > KVS_RDMA_PORTS)
		reader->failed = true;
	for (uint32_t p = 0; p < ports && !reader->failed; p++) {
		struct kvs_rdma_port *port = &offer_p->ports[p];
		port->link_layer = kvs_get_u32(reader);
		port->lid = kvs_get_u32(reader);
		port->mtu = kvs_get_u32(reader);
		port->max_message = kvs_get_u32(reader);
		port->rd_atom = kvs_get_u32(reader);
		port->gid_count = kvs_get_u32(reader);
		if (port->gid_count > KVS_RDMA_GIDS || port->mtu < 1 || port->mtu > 5)
			reader->failed = true;
		for (uint32_t g = 0; g < port->gid_count && !reader->failed; g++) {
			kvs_get_bytes(reader, port->gids[g].raw, sizeof(port->gids[g].raw));
			port->gids[g].type = kvs_get_u32(reader);
		}
	}
	kvs_get_text(reader, &offer_p->why);
	offer_p->port_count = reader->failed ? 0 : ports;
}
