/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the driver gives for RDMA devices: descriptors of ranges and the order of what a device writes. The device
 * itself is played, so that this also runs on a machine with a GPU and no such network.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../transport/rdma_gpu.h"
#include "model.h"

static const struct shape spread = {.layers = 2, .heads = 4, .page = 4, .items = 8, .k_width = 8192, .v_width = 8192};

static struct {
	int calls;
	uint64_t offset, address;
	size_t length;
	struct kvs_ibv_mr mr;
} seen;

static struct kvs_ibv_mr *reg_dmabuf_mr(struct kvs_ibv_pd *pd, uint64_t offset, size_t length, uint64_t address, int fd,
                                        int access)
{
	struct stat status;
	(void)pd;
	(void)access;
	CHECK(fstat(fd, &status) == 0, "%s", strerror(errno));
	seen.calls++;
	seen.offset = offset;
	seen.length = length;
	seen.address = address;
	return &seen.mr;
}

static struct kvs_ibv_mr *reg_mr(struct kvs_ibv_pd *pd, void *address, size_t length, int access)
{
	(void)pd;
	(void)address;
	(void)length;
	(void)access;
	errno = EFAULT;
	return NULL;
}

static const struct kvs_verbs verbs = {.reg_mr = reg_mr, .reg_dmabuf_mr = reg_dmabuf_mr};
static const struct kvs_verbs old_verbs = {.reg_mr = reg_mr};

static struct kvs_cuda_memory *look(const struct rank *rank)
{
	struct kvs_cuda_memory *memory = NULL;
	struct kvs_text text = {.s = ""};
	CHECK(kvs_cuda_memory_new(rank->layout, &memory, &text) && memory != NULL, "%s", text.s);
	return memory;
}

/* All tensors, up to the ends of the allocations that they lie in. */
static void register_all(enum kvs_cuda_kind kind, uint32_t parts, size_t shift)
{
	const struct driver *driver = driver_start(0);
	struct rank rank = rank_new(driver, &spread, 1, 0, 0, kind, parts, shift);
	struct kvs_cuda_memory *memory = look(&rank);
	struct kvs_rdma_device device = {.verbs = &verbs};
	struct kvs_text text = {.s = ""};
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), most = 0;
	for (uint32_t c = 0; c < COMPONENTS; c++) {
		for (uint32_t t = 0; t < rank.layout->components[c].tensor_count; t++) {
			const struct kvs_tensor *tensor = &rank.layout->components[c].tensors[t];
			for (uint64_t at = tensor->address; at < tensor->address + tensor->length;) {
				uint64_t end = kvs_rdma_gpu_end(memory, at, &text);
				CHECK(end > at, "%s", text.s);
				end = end < tensor->address + tensor->length ? end : tensor->address + tensor->length;
				struct kvs_ibv_mr *mr = kvs_rdma_gpu_register(&device, memory, at, end - at, 0, &text);
				if (mr == NULL && strstr(text.s, "not with this GPU and driver") != NULL)
					SKIP("%s", text.s);
				CHECK(mr == &seen.mr, "%s", text.s);
				CHECK(seen.address == at && seen.length == end - at && seen.offset == at % page);
				most = end - at > most ? end - at : most;
				at = end;
			}
		}
	}
	CHECK(seen.calls >= (int)parts && most > 0);
	kvs_cuda_memory_free(memory);
	rank_free(driver, &rank);
}

static void descriptor_legacy(void)
{
	register_all(KVS_CUDA_LEGACY, 1, 0);
}

static void descriptor_not_at_a_page(void)
{
	register_all(KVS_CUDA_LEGACY, 1, 4096 + 512);
}

static void descriptor_vmm(void)
{
	register_all(KVS_CUDA_VMM, 1, 0);
}

static void descriptor_vmm_of_many_handles(void)
{
	register_all(KVS_CUDA_VMM, 3, 512);
}

static void no_way(void)
{
	const struct driver *driver = driver_start(0);
	struct rank rank = rank_new(driver, &spread, 1, 0, 0, KVS_CUDA_LEGACY, 1, 0);
	struct kvs_cuda_memory *memory = look(&rank);
	struct kvs_rdma_device device = {.verbs = &old_verbs};
	struct kvs_text text = {.s = ""};
	uint64_t address = rank.layout->components[0].tensors[0].address;
	CHECK(kvs_rdma_gpu_register(&device, memory, address, 65536, 0, &text) == NULL);
	CHECK(strstr(text.s, "dma-buf: libibverbs has no ibv_reg_dmabuf_mr") != NULL, "%s", text.s);
	CHECK(strstr(text.s, "peer memory: Bad address") != NULL, "%s", text.s);
	CHECK(kvs_rdma_gpu_end(memory, 4096, &text) == 0);
	kvs_cuda_memory_free(memory);
	rank_free(driver, &rank);
}

static void order(void)
{
	const struct driver *driver = driver_start(0);
	struct rank rank = rank_new(driver, &spread, 1, 0, 0, KVS_CUDA_LEGACY, 1, 0);
	struct kvs_cuda_memory *memory = look(&rank);
	struct kvs_text text = {.s = ""};
	bool flush = false;
	CHECK(kvs_rdma_gpu_ordered(memory, &flush, &text), "%s", text.s);
	printf("       writes of network cards %s; the GPU's node is %d\n",
	       flush ? "are waited for" : "are seen in order", kvs_rdma_gpu_node(memory));
	if (flush)
		CHECK(kvs_rdma_gpu_flush(memory, &text), "%s", text.s);
	kvs_cuda_memory_free(memory);
	rank_free(driver, &rank);
}

const struct test rdma_tests[] = {{"rdma.descriptor", descriptor_legacy},
                                  {"rdma.descriptor, not at a page", descriptor_not_at_a_page},
                                  {"rdma.descriptor, vmm", descriptor_vmm},
                                  {"rdma.descriptor, vmm of many handles", descriptor_vmm_of_many_handles},
                                  {"rdma.no way", no_way},
                                  {"rdma.order", order},
                                  {NULL, NULL}};
