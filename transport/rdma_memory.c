/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "rdma_memory.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define PAGE (4096u)

struct range {
	uint64_t begin, end;
};

static int compare(const void *a, const void *b)
{
	const struct range *left = a, *right = b;
	if (left->begin != right->begin)
		return left->begin < right->begin ? -1 : 1;
	return 0;
}

void kvs_rdma_register_error(struct kvs_text *text, uint64_t address, uint64_t length, int error)
{
	struct rlimit limit = {.rlim_cur = 0};
	const char *what = strerror(error);
	if (error == ENOMEM && getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
		kvs_text_set(text,
		             "cannot register %" PRIu64 " bytes at 0x%" PRIx64 ": %s (RLIMIT_MEMLOCK is %" PRIu64
		             " bytes; raise it with ulimit -l unlimited, LimitMEMLOCK=infinity or --ulimit memlock=-1)",
		             length, address, what, (uint64_t)limit.rlim_cur);
		return;
	}
	kvs_text_set(text, "cannot register %" PRIu64 " bytes at 0x%" PRIx64 ": %s", length, address, what);
}

/* The layout's memory as ranges that do not overlap, sorted. Ranges that only touch may be of different allocations. */
static struct range *collect(const struct kvs_layout *layout, uint32_t *count_p)
{
	size_t count = 0;
	uint32_t kept = 0;
	for (uint32_t c = 0; c < layout->component_count; c++)
		count += layout->components[c].tensor_count;
	struct range *ranges = calloc(count + 1, sizeof(*ranges));
	if (ranges == NULL)
		return NULL;
	count = 0;
	for (uint32_t c = 0; c < layout->component_count; c++) {
		for (uint32_t t = 0; t < layout->components[c].tensor_count; t++) {
			const struct kvs_tensor *tensor = &layout->components[c].tensors[t];
			if (tensor->item_len != 0 && tensor->length != 0)
				ranges[count++] = (struct range){tensor->address, tensor->address + tensor->length};
		}
	}
	qsort(ranges, count, sizeof(*ranges), compare);
	for (size_t i = 0; i < count; i++) {
		if (kept > 0 && ranges[i].begin < ranges[kept - 1].end) {
			if (ranges[i].end > ranges[kept - 1].end)
				ranges[kept - 1].end = ranges[i].end;
		} else {
			ranges[kept++] = ranges[i];
		}
	}
	*count_p = kept;
	return ranges;
}

static bool add_piece(struct kvs_rdma_pieces *pieces, uint32_t *capacity, struct kvs_rdma_piece piece)
{
	if (pieces->count == *capacity) {
		uint32_t grown = *capacity == 0 ? 64 : *capacity * 2;
		void *moved = realloc(pieces->pieces, (size_t)grown * sizeof(*pieces->pieces));
		if (moved == NULL)
			return false;
		pieces->pieces = moved;
		*capacity = grown;
	}
	pieces->pieces[pieces->count++] = piece;
	return true;
}

static struct kvs_ibv_mr *register_piece(struct kvs_rdma_device *device, const struct kvs_cuda_memory *gpu,
                                         uint64_t address, uint64_t length, int access, struct kvs_text *text)
{
	if (gpu != NULL)
		return kvs_rdma_gpu_register(device, gpu, address, length, access, text);
	errno = EIO;
	struct kvs_ibv_mr *mr = device->verbs->reg_mr(device->pd, (void *)(uintptr_t)address, (size_t)length, access);
	if (mr == NULL)
		kvs_rdma_register_error(text, address, length, errno);
	return mr;
}

/* A range in pieces that the device takes, whole pages each but for the ends, and of one allocation of a GPU's. */
static bool register_range(struct kvs_rdma_device *device, const struct range *range, struct kvs_cuda_memory *gpu,
                           int access, struct kvs_rdma_pieces *pieces, uint32_t *capacity, struct kvs_text *text)
{
	uint64_t most = device->attr.max_mr_size;
	if (most == 0 || most > (uint64_t)1 << 40)
		most = (uint64_t)1 << 40;
	most = most > PAGE ? most / PAGE * PAGE : most;
	for (uint64_t at = range->begin; at < range->end;) {
		uint64_t end = gpu == NULL ? range->end : kvs_rdma_gpu_end(gpu, at, text);
		if (end == 0)
			return false;
		end = end < range->end ? end : range->end;
		uint64_t length = end - at < most ? end - at : most;
		struct kvs_ibv_mr *mr = register_piece(device, gpu, at, length, access, text);
		if (mr == NULL)
			return false;
		uint32_t key = (access & KVS_IBV_ACCESS_REMOTE_READ) != 0 ? mr->rkey : mr->lkey;
		if (!add_piece(pieces, capacity, (struct kvs_rdma_piece){at, length, key, mr})) {
			device->verbs->dereg_mr(mr);
			kvs_text_set(text, "out of memory");
			return false;
		}
		at += length;
	}
	return true;
}

bool kvs_rdma_register(struct kvs_rdma_device *device, const struct kvs_layout *layout, struct kvs_cuda_memory *gpu,
                       int access, struct kvs_rdma_pieces *pieces_p, struct kvs_text *text)
{
	uint32_t count = 0, capacity = 0;
	*pieces_p = (struct kvs_rdma_pieces){.count = 0};
	struct range *ranges = collect(layout, &count);
	bool ok = ranges != NULL;
	if (!ok)
		kvs_text_set(text, "out of memory");
	for (uint32_t i = 0; i < count && ok; i++) {
		struct kvs_text why = {.s = ""};
		ok = register_range(device, &ranges[i], gpu, access, pieces_p, &capacity, &why);
		if (!ok)
			kvs_text_set(text, "%s, region %u of %u: %.380s", device->name, i + 1, count, why.s);
	}
	free(ranges);
	if (!ok)
		kvs_rdma_deregister(device, pieces_p);
	return ok;
}

void kvs_rdma_deregister(struct kvs_rdma_device *device, struct kvs_rdma_pieces *pieces)
{
	for (uint32_t i = 0; i < pieces->count; i++) {
		if (pieces->pieces[i].mr != NULL)
			device->verbs->dereg_mr(pieces->pieces[i].mr);
	}
	free(pieces->pieces);
	*pieces = (struct kvs_rdma_pieces){.count = 0};
}

const struct kvs_rdma_piece *kvs_rdma_find(const struct kvs_rdma_pieces *pieces, uint64_t address, uint32_t *hint_p)
{
	uint32_t low = 0, high = pieces->count;
	if (*hint_p < pieces->count && address - pieces->pieces[*hint_p].address < pieces->pieces[*hint_p].length)
		return &pieces->pieces[*hint_p];
	while (low < high) {
		uint32_t middle = low + (high - low) / 2;
		if (pieces->pieces[middle].address <= address)
			low = middle + 1;
		else
			high = middle;
	}
	if (low == 0 || address - pieces->pieces[low - 1].address >= pieces->pieces[low - 1].length)
		return NULL;
	*hint_p = low - 1;
	return &pieces->pieces[low - 1];
}
