/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda_link.h"

#include <stdlib.h>
#include <string.h>

#include "cuda_wake.h"

/* NULL: out of memory. */
static struct kvs_cuda_link *cuda_of(struct kvs_link *link)
{
	if (link->cuda == NULL)
		link->cuda = calloc(1, sizeof(*link->cuda));
	return link->cuda;
}

struct kvs_writer kvs_cuda_offer(struct kvs_link *link)
{
	struct kvs_writer writer = {.data = NULL};
	struct kvs_cuda_memory *memory = link->endpoint->cuda;
	struct kvs_text why;
	if (memory == NULL)
		return writer;
	if (cuda_of(link) == NULL) {
		writer.failed = true;
		return writer;
	}
	/* A server that was paused and goes on has other memory now than at its registration. */
	(void)kvs_cuda_memory_renew_if_changed(memory, &why);
	link->cuda->epoch = kvs_cuda_memory_epoch(memory);
	kvs_cuda_exports_put(&writer, memory);
	return writer;
}

bool kvs_cuda_sources_same(struct kvs_link *link, const struct kvs_plan *plan, uint32_t component, bool *renewed_p,
                           struct kvs_text *text)
{
	struct kvs_cuda_memory *memory = link->endpoint->cuda;
	struct kvs_text why;
	if (memory == NULL)
		return true;
	*renewed_p = false;
	bool same = kvs_cuda_memory_check(memory, plan, KVS_SIDE_SOURCE, component, text);
	if (same && link->cuda != NULL && link->cuda->epoch == kvs_cuda_memory_epoch(memory))
		return true;
	if (same)
		kvs_text_set(text, "the prefill's GPU memory was replaced");
	*renewed_p = same || kvs_cuda_memory_renew(memory, &why);
	return false;
}

bool kvs_cuda_take_offer(struct kvs_link *link, const void *data, size_t size)
{
	struct kvs_cuda_link *cuda = cuda_of(link);
	if (cuda == NULL)
		return false;
	if (size == 0)
		kvs_text_set(&cuda->offer_text, "the prefill offers no GPU memory");
	else
		cuda->offer = kvs_cuda_exports_get(data, size, link->peer_layout, &cuda->offer_text);
	return true;
}

bool kvs_cuda_open_linear(struct kvs_link *link, struct kvs_text *text)
{
	if (link->endpoint->cuda == NULL)
		return true;
	struct kvs_cuda_link *cuda = cuda_of(link);
	if (cuda == NULL) {
		kvs_text_set(text, "out of memory");
		return false;
	}
	if (cuda->engine.gpu == NULL && !kvs_cuda_engine_open(&cuda->engine, link->endpoint->cuda->gpu, text))
		return false;
	return kvs_cuda_engine_reserve(&cuda->engine, text);
}

void kvs_cuda_free(struct kvs_link *link)
{
	struct kvs_cuda_link *cuda = link->cuda;
	if (cuda == NULL)
		return;
	kvs_cuda_engine_close(&cuda->engine);
	kvs_cuda_imports_free(cuda->imports);
	kvs_cuda_exports_free(cuda->offer);
	free(cuda->sources);
	free(cuda);
	link->cuda = NULL;
}

void kvs_cuda_after_fork_in_child(void)
{
	kvs_cuda_gpu_after_fork_in_child();
	kvs_cuda_imports_after_fork_in_child();
	kvs_cuda_wake_after_fork_in_child();
}

bool kvs_linear_get(struct kvs_link *link, const struct kvs_plan *plan, uint64_t stream, struct kvs_cursor *cursor,
                    void *linear_p, size_t size, struct kvs_text *text)
{
	if (link->endpoint->cuda == NULL)
		return kvs_copy_pack(plan, cursor, linear_p, size) == size;
	struct kvs_cuda_link *cuda = link->cuda;
	if (cuda == NULL || cuda->engine.gpu == NULL) {
		kvs_text_set(text, "nothing was made to pack GPU memory with");
		return false;
	}
	if (cuda->stream != stream) {
		if (!kvs_cuda_engine_begin(&cuda->engine, plan, KVS_GPU_PACK, NULL, KVS_CUDA_METHOD_AUTO, text))
			return false;
		cuda->stream = stream;
	}
	return kvs_cuda_engine_pack(&cuda->engine, linear_p, size, text);
}

bool kvs_linear_put(struct kvs_link *link, struct kvs_sink *sink, const void *linear, size_t size,
                    struct kvs_text *text)
{
	if (link->endpoint->cuda == NULL)
		return kvs_copy_unpack(sink->plan, &sink->cursor, linear, size) == size;
	struct kvs_cuda_link *cuda = link->cuda;
	if (cuda == NULL || cuda->engine.gpu == NULL) {
		kvs_text_set(text, "nothing was made to unpack into GPU memory with");
		return false;
	}
	if (cuda->stream != sink->stream) {
		if (!kvs_cuda_engine_begin(&cuda->engine, sink->plan, KVS_GPU_UNPACK, NULL, KVS_CUDA_METHOD_AUTO, text))
			return false;
		cuda->stream = sink->stream;
	}
	return kvs_cuda_engine_unpack(&cuda->engine, linear, size, text);
}

void kvs_linear_end(struct kvs_link *link)
{
	struct kvs_cuda_link *cuda = link->cuda;
	if (cuda == NULL || cuda->stream == 0)
		return;
	cuda->stream = 0;
	kvs_cuda_engine_drain(&cuda->engine);
}
