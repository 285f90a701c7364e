/* SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

#include <string.h>

uint32_t shape_local_heads(const struct shape *shape, uint32_t tp_size)
{
	return shape->heads >= tp_size ? shape->heads / tp_size : 1;
}

static uint32_t global_head(const struct rank *rank, uint32_t local)
{
	uint32_t heads = rank->shape.heads;
	if (heads >= rank->tp_size)
		return rank->tp_rank * (heads / rank->tp_size) + local;
	return rank->tp_rank / (rank->tp_size / heads);
}

/* The byte of a tensor (its number over all components), token slot, head. Never a canary. */
static uint8_t value(uint32_t tensor, uint64_t token, uint32_t head, uint32_t byte)
{
	uint64_t x = ((uint64_t)tensor << 48) ^ (token << 20) ^ ((uint64_t)head << 12) ^ byte;
	x = (x ^ (x >> 31)) * 0x7fb5d329728ea185u;
	x = (x ^ (x >> 27)) * 0x81dadef4bc2dd44du;
	uint8_t v = (uint8_t)(x >> 56);
	return v == CANARY ? 0x5a : v;
}

static uint32_t tensors(const struct rank *rank)
{
	return COMPONENTS * 2 * rank->shape.layers;
}

static const struct kvs_tensor *tensor_of(const struct rank *rank, uint32_t number)
{
	uint32_t each = 2 * rank->shape.layers;
	return &rank->layout->components[number / each].tensors[number % each];
}

static uint32_t width_of(const struct rank *rank, uint32_t number)
{
	return number % (2 * rank->shape.layers) < rank->shape.layers ? rank->shape.k_width : rank->shape.v_width;
}

struct rank rank_new(const struct driver *driver, const struct shape *shape, uint32_t tp_size, uint32_t tp_rank,
                     int device, enum kvs_cuda_kind kind, uint32_t parts, size_t shift)
{
	struct rank rank = {.shape = *shape, .tp_size = tp_size, .tp_rank = tp_rank};
	uint32_t local = shape_local_heads(shape, tp_size);
	uint64_t k_item = (uint64_t)shape->page * local * shape->k_width;
	uint64_t v_item = (uint64_t)shape->page * local * shape->v_width;
	rank.size = shift + (size_t)(COMPONENTS * shape->layers * (k_item + v_item) * shape->items);
	rank.block = block_new(driver, device, kind, rank.size, parts);
	struct kvs_layout *layout = rank.layout = kvs_layout_new(COMPONENTS);
	layout->tp_size = tp_size;
	layout->tp_rank = tp_rank;
	layout->pp_size = 1;
	layout->page_size = shape->page;
	(void)snprintf(layout->dtype, sizeof(layout->dtype), "bfloat16");
	layout->head_rule = KVS_HEADS_REPLICATED;
	uint64_t at = rank.block.address + shift;
	for (uint32_t c = 0; c < COMPONENTS; c++) {
		(void)snprintf(layout->components[c].type, KVS_NAME_SIZE, "%s", c == 0 ? "kv" : "swa");
		layout->components[c].order = KVS_ORDER_NHD;
		CHECK(kvs_layout_set_tensors(layout, c, 2 * shape->layers));
		for (uint32_t t = 0; t < 2 * shape->layers; t++) {
			uint64_t item = t < shape->layers ? k_item : v_item;
			layout->components[c].tensors[t] = (struct kvs_tensor){.address = at,
			                                                       .length = item * shape->items,
			                                                       .item_len = item,
			                                                       .layer_id = KVS_NO_LAYER};
			at += item * shape->items;
		}
	}
	return rank;
}

void rank_free(const struct driver *driver, struct rank *rank)
{
	kvs_layout_free(rank->layout);
	block_free(driver, &rank->block);
}

void rank_blank(const struct driver *driver, const struct rank *rank)
{
	if (rank->block.kind == KVS_CUDA_HOST)
		memset((void *)(uintptr_t)rank->block.address, CANARY, rank->size);
	else
		CHECK(driver->MemsetD8(rank->block.address, CANARY, rank->size) == 0);
}

void rank_fill(const struct driver *driver, const struct rank *rank)
{
	uint8_t *bytes = malloc(rank->size);
	CHECK(bytes != NULL);
	memset(bytes, CANARY, rank->size);
	for (uint32_t n = 0; n < tensors(rank); n++) {
		const struct kvs_tensor *tensor = tensor_of(rank, n);
		uint8_t *to = bytes + (tensor->address - rank->block.address);
		uint32_t local = shape_local_heads(&rank->shape, rank->tp_size), width = width_of(rank, n);
		for (uint64_t token = 0; token < (uint64_t)rank->shape.items * rank->shape.page; token++) {
			for (uint32_t h = 0; h < local; h++) {
				for (uint32_t b = 0; b < width; b++)
					*to++ = value(n, token, global_head(rank, h), b);
			}
		}
	}
	if (rank->block.kind == KVS_CUDA_HOST)
		memcpy((void *)(uintptr_t)rank->block.address, bytes, rank->size);
	else
		device_write(driver, rank->block.address, bytes, rank->size);
	free(bytes);
}

uint64_t rank_verify(const struct driver *driver, const struct rank *rank, const int32_t *src, const int32_t *dst,
                     const uint32_t counts[COMPONENTS])
{
	uint8_t *bytes = malloc(rank->size), *expected = malloc(rank->size);
	uint64_t wrong = 0;
	CHECK(bytes != NULL && expected != NULL);
	memset(expected, CANARY, rank->size);
	if (rank->block.kind == KVS_CUDA_HOST)
		memcpy(bytes, (void *)(uintptr_t)rank->block.address, rank->size);
	else
		device_read(driver, bytes, rank->block.address, rank->size);
	uint32_t local = shape_local_heads(&rank->shape, rank->tp_size), page = rank->shape.page;
	for (uint32_t n = 0; n < tensors(rank); n++) {
		const struct kvs_tensor *tensor = tensor_of(rank, n);
		uint32_t width = width_of(rank, n);
		for (uint32_t i = 0; i < counts[n / (2 * rank->shape.layers)]; i++) {
			uint8_t *to = expected + (tensor->address - rank->block.address) +
			              (uint64_t)dst[i] * tensor->item_len;
			for (uint32_t t = 0; t < page; t++) {
				for (uint32_t h = 0; h < local; h++) {
					for (uint32_t b = 0; b < width; b++)
						*to++ = value(n, (uint64_t)src[i] * page + t, global_head(rank, h), b);
				}
			}
		}
	}
	for (size_t i = 0; i < rank->size; i++)
		wrong += bytes[i] != expected[i];
	free(bytes);
	free(expected);
	return wrong;
}

uint64_t rank_stray(const struct driver *driver, const struct rank *rank, const int32_t *dst,
                    const uint32_t counts[COMPONENTS])
{
	uint8_t *bytes = malloc(rank->size);
	uint64_t stray = 0;
	CHECK(bytes != NULL);
	device_read(driver, bytes, rank->block.address, rank->size);
	for (uint32_t n = 0; n < tensors(rank); n++) {
		const struct kvs_tensor *tensor = tensor_of(rank, n);
		uint8_t *first = bytes + (tensor->address - rank->block.address);
		for (uint32_t i = 0; i < counts[n / (2 * rank->shape.layers)]; i++)
			memset(first + (uint64_t)dst[i] * tensor->item_len, CANARY, tensor->item_len);
	}
	for (size_t i = 0; i < rank->size; i++)
		stray += bytes[i] != CANARY;
	free(bytes);
	return stray;
}
