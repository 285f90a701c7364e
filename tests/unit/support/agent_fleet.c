/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "agent_fleet.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "random.h"
#include "shapes.h"
#include "transport/log.h"
#include "transport/state.h"

#define LOG_LINES 4096
#define LOG_WIDTH 768

struct fleet_log {
	atomic_uint count;
	char lines[LOG_LINES][LOG_WIDTH];
};

enum op {
	OP_OPEN,
	OP_CLOSE,
	OP_STATE,
	OP_CPU,
	OP_QUIT,
};

struct command {
	enum op op;
	uint32_t rank;
	uint32_t room;
	uint32_t argument; /* the end, or whose items */
};

struct reply {
	uint64_t value;
	struct kvs_text text;
};

struct kvs_agent_config fleet_prefill_config = {
        .timeout_ms = 20000, .staging_bytes = 64u << 20, .transports = "cuda_ipc,rdma,host,tcp,engine"};
struct kvs_agent_config fleet_decode_config = {
        .timeout_ms = 20000, .staging_bytes = 64u << 20, .transports = "cuda_ipc,rdma,host,tcp,engine"};
void (*fleet_child_setup)(void);
void *(*fleet_allocate)(size_t size);
void (*fleet_release)(void *memory);

static struct fleet_log *fleet_log;

/* Asked for by the leak check of a sanitizer build: Criterion's own memory is not what these tests are about. */
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
	return "leak:libcriterion\n";
}

static void log_sink(enum kvs_log_level level, const char *function, const char *message)
{
	uint32_t i = atomic_fetch_add(&fleet_log->count, 1);
	if (i < LOG_LINES)
		(void)snprintf(fleet_log->lines[i], LOG_WIDTH, "%d %s: %s", (int)level, function, message);
	if (getenv("FLEET_LOG") != NULL)
		(void)fprintf(stderr, "[%d] %d %s: %s\n", (int)getpid(), (int)level, function, message);
}

uint32_t fleet_log_count(const char *text)
{
	uint32_t found = 0, count = atomic_load(&fleet_log->count);
	for (uint32_t i = 0; i < count && i < LOG_LINES; i++)
		found += strstr(fleet_log->lines[i], text) != NULL;
	return found;
}

void fleet_log_clear(void)
{
	atomic_store(&fleet_log->count, 0);
}

static void *shared_memory(size_t size)
{
	void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	cr_assert(memory != MAP_FAILED);
	return memory;
}

static struct kvs_layout *make_rank(const struct fleet *fleet, uint32_t tp, uint32_t rank)
{
	const struct fleet_shape *shape = &fleet->shape;
	struct kvs_layout *layout = shape_kv(
	        tp, rank, shape->page_size, shape->layers,
	        shape_item(shape->heads, tp, shape->page_size, shape->k_width),
	        shape->v_width == 0 ? 0 : shape_item(shape->heads, tp, shape->page_size, shape->v_width), fleet->items);
	for (uint32_t t = 0; t < layout->components[0].tensor_count; t++) {
		struct kvs_tensor *tensor = &layout->components[0].tensors[t];
		void *memory = fleet_allocate != NULL ? fleet_allocate(tensor->length) : shared_memory(tensor->length);
		tensor->address = (uint64_t)(uintptr_t)memory;
	}
	return layout;
}

static int32_t *shuffled(uint32_t count, uint64_t seed)
{
	int32_t *items = malloc(count * sizeof(*items));
	cr_assert(items != NULL);
	for (uint32_t i = 0; i < count; i++)
		items[i] = (int32_t)i;
	for (uint32_t i = count - 1; i > 0; i--) {
		uint32_t j = test_random_in(&seed, 0, i);
		int32_t other = items[i];
		items[i] = items[j];
		items[j] = other;
	}
	return items;
}

static void call(struct fleet *fleet, const struct command *command, struct reply *reply_p)
{
	cr_assert(send(fleet->control, command, sizeof(*command), MSG_NOSIGNAL) == sizeof(*command));
	cr_assert(recv(fleet->control, reply_p, sizeof(*reply_p), MSG_WAITALL) == sizeof(*reply_p));
}

static uint64_t open_room(const struct fleet *fleet, uint64_t endpoint, uint32_t room, uint32_t items_of,
                          struct kvs_text *text)
{
	struct kvs_item_list list = {.items = fleet->dst + (size_t)items_of * fleet->shape.pages,
	                             .count = fleet->shape.pages};
	return kvs_room_open(endpoint, room + 1, &list, 1, text);
}

static void child_main(struct fleet *fleet, int control)
{
	uint64_t endpoints[FLEET_RANKS] = {0};
	struct command command;
	struct reply reply;
	if (fleet_child_setup != NULL)
		fleet_child_setup();
	if (!kvs_agent_configure(&fleet_decode_config, &reply.text))
		_exit(3);
	for (uint32_t d = 0; d < fleet->shape.decode_tp; d++) {
		uint8_t record[KVS_RECORD_MAX] = {0};
		endpoints[d] = kvs_endpoint_add(KVS_ROLE_DECODE, fleet->decode[d], "127.0.0.1", &reply.text);
		uint64_t size = kvs_endpoint_record(endpoints[d], record);
		if (endpoints[d] == 0 || write(control, &size, sizeof(size)) != sizeof(size) ||
		    write(control, record, sizeof(record)) != sizeof(record))
			_exit(4);
	}
	while (recv(control, &command, sizeof(command), MSG_WAITALL) == sizeof(command)) {
		struct rusage usage;
		memset(&reply, 0, sizeof(reply));
		switch (command.op) {
		case OP_OPEN:
			reply.value =
			        open_room(fleet, endpoints[command.rank], command.room, command.argument, &reply.text);
			break;
		case OP_CLOSE:
			kvs_room_close(endpoints[command.rank], command.room + 1, (enum kvs_room_end)command.argument);
			break;
		case OP_STATE:
			reply.value = kvs_room_state(endpoints[command.rank], command.room + 1, &reply.text);
			break;
		case OP_CPU:
			getrusage(RUSAGE_SELF, &usage);
			reply.value = (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000 +
			              (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
			break;
		case OP_QUIT:
			break;
		}
		if (command.op == OP_QUIT) {
			for (uint32_t d = 0; d < fleet->shape.decode_tp; d++)
				kvs_endpoint_remove(endpoints[d]);
		}
		if (write(control, &reply, sizeof(reply)) != sizeof(reply) || command.op == OP_QUIT)
			break;
	}
	exit(0); /* not _exit: the leak check of a sanitizer build runs there */
}

struct fleet *fleet_start_decode(const struct fleet_shape *shape)
{
	struct fleet *fleet = calloc(1, sizeof(*fleet));
	int pair[2];
	cr_assert(fleet != NULL);
	if (fleet_log == NULL)
		fleet_log = shared_memory(sizeof(*fleet_log));
	kvs_log_set_sink(log_sink, KVS_LOG_DEBUG);
	fleet->shape = *shape;
	fleet->items = shape->pages * shape->rooms + 5;
	fleet->src = shuffled(fleet->items, 1);
	fleet->dst = shuffled(fleet->items, 2);
	for (uint32_t r = 0; r < shape->prefill_tp; r++)
		fleet->prefill[r] = make_rank(fleet, shape->prefill_tp, r);
	for (uint32_t d = 0; d < shape->decode_tp; d++)
		fleet->decode[d] = make_rank(fleet, shape->decode_tp, d);
	cr_assert(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
	fleet->child = fork();
	cr_assert(fleet->child >= 0);
	if (fleet->child == 0) {
		close(pair[0]);
		child_main(fleet, pair[1]);
	}
	close(pair[1]);
	fleet->control = pair[0];
	for (uint32_t d = 0; d < shape->decode_tp; d++) {
		uint64_t size = 0;
		cr_assert(recv(pair[0], &size, sizeof(size), MSG_WAITALL) == sizeof(size));
		cr_assert(recv(pair[0], fleet->records[d], KVS_RECORD_MAX, MSG_WAITALL) == KVS_RECORD_MAX);
		fleet->record_sizes[d] = size;
	}
	return fleet;
}

void fleet_join(struct fleet *fleet)
{
	struct kvs_text text = {.s = ""};
	cr_assert(kvs_agent_configure(&fleet_prefill_config, &text), "%s", text.s);
	for (uint32_t r = 0; r < fleet->shape.prefill_tp; r++) {
		fleet->endpoints[r] = kvs_endpoint_add(KVS_ROLE_PREFILL, fleet->prefill[r], "127.0.0.1", &text);
		cr_assert(fleet->endpoints[r] != 0, "%s", text.s);
	}
	for (uint32_t d = 0; d < fleet->shape.decode_tp; d++) {
		fleet->peers[d] = kvs_peer_add(fleet->records[d], fleet->record_sizes[d], &text);
		cr_assert(fleet->peers[d] != 0, "%s", text.s);
	}
}

struct fleet *fleet_start(const struct fleet_shape *shape)
{
	struct fleet *fleet = fleet_start_decode(shape);
	fleet_join(fleet);
	return fleet;
}

static void free_rank(struct kvs_layout *layout)
{
	for (uint32_t t = 0; t < layout->components[0].tensor_count; t++) {
		void *memory = (void *)(uintptr_t)layout->components[0].tensors[t].address;
		if (fleet_release != NULL)
			fleet_release(memory);
		else
			munmap(memory, layout->components[0].tensors[t].length);
	}
	kvs_layout_free(layout);
}

void fleet_stop(struct fleet *fleet)
{
	struct command command = {.op = OP_QUIT};
	struct reply reply;
	int status = 0;
	for (uint32_t r = 0; r < fleet->shape.prefill_tp; r++)
		kvs_endpoint_remove(fleet->endpoints[r]);
	for (uint32_t d = 0; d < fleet->shape.decode_tp; d++)
		kvs_peer_remove(fleet->peers[d]);
	if (fleet->child > 0) {
		call(fleet, &command, &reply);
		cr_assert(waitpid(fleet->child, &status, 0) == fleet->child);
		cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the decode's process ended with status 0x%x",
		          (unsigned)status);
	}
	close(fleet->control);
	for (uint32_t r = 0; r < fleet->shape.prefill_tp; r++)
		free_rank(fleet->prefill[r]);
	for (uint32_t d = 0; d < fleet->shape.decode_tp; d++)
		free_rank(fleet->decode[d]);
	free(fleet->src);
	free(fleet->dst);
	free(fleet);
}

/* The value of one 8-byte word of the unsharded model: widths are multiples of 8. */
static uint64_t value(uint32_t tensor, uint32_t room, uint32_t page, uint32_t token, uint32_t head, uint32_t word)
{
	uint64_t x = ((((uint64_t)tensor * 64 + room) * 4096 + page) * 256 + token) * 64 + head;
	return test_mix(x * 1024 + word);
}

/* The first global head that a rank holds. */
static uint32_t first_head(const struct fleet_shape *shape, uint32_t tp, uint32_t rank)
{
	return tp <= shape->heads ? rank * (shape->heads / tp) : rank / (tp / shape->heads);
}

/* Call for each word of one page of one tensor: fill it, or count those that differ. */
static uint64_t page_words(const struct fleet *fleet, const struct kvs_layout *layout, uint32_t t, uint32_t room,
                           uint32_t page, int32_t item, bool fill)
{
	const struct fleet_shape *shape = &fleet->shape;
	const struct kvs_tensor *tensor = &layout->components[0].tensors[t];
	uint32_t width = t < shape->layers ? shape->k_width : shape->v_width;
	uint32_t heads = shape_heads(shape->heads, layout->tp_size);
	uint64_t *word = (uint64_t *)(uintptr_t)(tensor->address + (uint64_t)item * tensor->item_len), wrong = 0;
	for (uint32_t token = 0; token < shape->page_size; token++) {
		for (uint32_t h = 0; h < heads; h++) {
			uint32_t head = first_head(shape, layout->tp_size, layout->tp_rank) + h;
			for (uint32_t w = 0; w < width / 8; w++, word++) {
				uint64_t right = value(t, room, page, token, head, w);
				if (fill)
					*word = right;
				else
					wrong += *word != right;
			}
		}
	}
	return wrong * 8;
}

void fleet_fill(struct fleet *fleet)
{
	for (uint32_t r = 0; r < fleet->shape.prefill_tp; r++) {
		for (uint32_t t = 0; t < fleet->prefill[r]->components[0].tensor_count; t++) {
			for (uint32_t i = 0; i < fleet->shape.rooms * fleet->shape.pages; i++)
				page_words(fleet, fleet->prefill[r], t, i / fleet->shape.pages, i % fleet->shape.pages,
				           fleet->src[i], true);
		}
	}
	for (uint32_t d = 0; d < fleet->shape.decode_tp; d++) {
		for (uint32_t t = 0; t < fleet->decode[d]->components[0].tensor_count; t++) {
			const struct kvs_tensor *tensor = &fleet->decode[d]->components[0].tensors[t];
			memset((void *)(uintptr_t)tensor->address, FLEET_CANARY, tensor->length);
		}
	}
}

uint64_t fleet_wrong(const struct fleet *fleet, uint32_t room)
{
	uint64_t wrong = 0;
	for (uint32_t d = 0; d < fleet->shape.decode_tp; d++) {
		for (uint32_t t = 0; t < fleet->decode[d]->components[0].tensor_count; t++) {
			for (uint32_t p = 0; p < fleet->shape.pages; p++)
				wrong += page_words(fleet, fleet->decode[d], t, room, p,
				                    fleet->dst[(size_t)room * fleet->shape.pages + p], false);
		}
	}
	return wrong;
}

static uint64_t touched_items(const struct fleet *fleet, uint32_t first, uint32_t count)
{
	uint64_t touched = 0;
	for (uint32_t d = 0; d < fleet->shape.decode_tp; d++) {
		for (uint32_t t = 0; t < fleet->decode[d]->components[0].tensor_count; t++) {
			const struct kvs_tensor *tensor = &fleet->decode[d]->components[0].tensors[t];
			for (uint32_t i = first; i < first + count; i++) {
				const uint8_t *byte =
				        (const uint8_t *)(uintptr_t)(tensor->address +
				                                     (uint64_t)fleet->dst[i] * tensor->item_len);
				for (uint64_t b = 0; b < tensor->item_len; b++)
					touched += byte[b] != FLEET_CANARY;
			}
		}
	}
	return touched;
}

uint64_t fleet_touched(const struct fleet *fleet, uint32_t room)
{
	return touched_items(fleet, room * fleet->shape.pages, fleet->shape.pages);
}

bool fleet_reached(const struct fleet *fleet, uint32_t room, uint32_t percent)
{
	/* The bytes come tensor by tensor, item by item. */
	const struct kvs_component *component = &fleet->decode[0]->components[0];
	uint64_t at = (uint64_t)component->tensor_count * fleet->shape.pages * percent / 100;
	const struct kvs_tensor *tensor = &component->tensors[at / fleet->shape.pages];
	int32_t item = fleet->dst[(uint64_t)room * fleet->shape.pages + at % fleet->shape.pages];
	const _Atomic uint64_t *word =
	        (const _Atomic uint64_t *)(uintptr_t)(tensor->address + (uint64_t)item * tensor->item_len);
	return atomic_load(word) != FLEET_CANARY * 0x0101010101010101u;
}

uint64_t fleet_strayed(const struct fleet *fleet)
{
	uint32_t used = fleet->shape.rooms * fleet->shape.pages;
	return touched_items(fleet, used, fleet->items - used);
}

uint64_t fleet_open(struct fleet *fleet, uint32_t rank, uint32_t room)
{
	return fleet_open_as(fleet, rank, room, room);
}

uint64_t fleet_open_as(struct fleet *fleet, uint32_t rank, uint32_t room, uint32_t items_of)
{
	struct command command = {.op = OP_OPEN, .rank = rank, .room = room, .argument = items_of};
	struct reply reply;
	call(fleet, &command, &reply);
	cr_assert(reply.value != 0, "%s", reply.text.s);
	return reply.value;
}

void fleet_close(struct fleet *fleet, uint32_t rank, uint32_t room, enum kvs_room_end end)
{
	struct command command = {.op = OP_CLOSE, .rank = rank, .room = room, .argument = (uint32_t)end};
	struct reply reply;
	call(fleet, &command, &reply);
}

enum kvs_room_state fleet_state(struct fleet *fleet, uint32_t rank, uint32_t room, struct kvs_text *text)
{
	struct command command = {.op = OP_STATE, .rank = rank, .room = room};
	struct reply reply;
	call(fleet, &command, &reply);
	if (text != NULL)
		*text = reply.text;
	return (enum kvs_room_state)reply.value;
}

uint64_t fleet_decode_cpu_us(struct fleet *fleet)
{
	struct command command = {.op = OP_CPU};
	struct reply reply;
	call(fleet, &command, &reply);
	return reply.value;
}

struct kvs_pull fleet_pull(const struct fleet *fleet, uint32_t prefill_rank, uint32_t decode_rank, uint32_t room,
                           uint64_t generation)
{
	size_t first = (size_t)room * fleet->shape.pages;
	return (struct kvs_pull){.endpoint = fleet->endpoints[prefill_rank],
	                         .peer = fleet->peers[decode_rank],
	                         .room = room + 1,
	                         .generation = generation,
	                         .src_items = fleet->src + first,
	                         .src_count = fleet->shape.pages,
	                         .dst_items = fleet->dst + first,
	                         .dst_count = fleet->shape.pages};
}

uint32_t fleet_first_target(const struct fleet *fleet, uint32_t prefill_rank, uint32_t *count_p)
{
	uint32_t p = fleet->shape.prefill_tp, d = fleet->shape.decode_tp;
	*count_p = p < d ? d / p : 1;
	return p < d ? prefill_rank * (d / p) : prefill_rank / (p / d);
}

static void *job_main(void *argument)
{
	struct fleet_job *job = argument;
	job->began_ns = kvs_now_ns();
	job->ok = kvs_pull(&job->pull, &job->text);
	job->ended_ns = kvs_now_ns();
	atomic_store(&job->done, true);
	return NULL;
}

void fleet_begin(struct fleet_job *job, const struct kvs_pull *pull)
{
	memset(job, 0, sizeof(*job));
	job->pull = *pull;
	cr_assert(pthread_create(&job->thread, NULL, job_main, job) == 0);
}

bool fleet_end(struct fleet_job *job)
{
	pthread_join(job->thread, NULL);
	return job->ok;
}

atomic_bool fleet_load_ends;

void *fleet_load(void *argument)
{
	struct fleet *fleet = argument;
	uintptr_t moved = 0;
	while (!atomic_load(&fleet_load_ends)) {
		struct kvs_pull pull = fleet_pull(fleet, 0, 0, 0, 0);
		struct kvs_text text;
		moved += kvs_pull(&pull, &text);
	}
	return (void *)moved;
}

bool fleet_transfer(struct fleet *fleet, uint32_t room)
{
	uint64_t generations[FLEET_RANKS];
	bool ok = true;
	for (uint32_t d = 0; d < fleet->shape.decode_tp; d++)
		generations[d] = fleet_open(fleet, d, room);
	for (uint32_t r = 0; r < fleet->shape.prefill_tp; r++) {
		uint32_t count, first = fleet_first_target(fleet, r, &count);
		for (uint32_t d = first; d < first + count; d++) {
			struct kvs_pull pull = fleet_pull(fleet, r, d, room, generations[d]);
			struct kvs_text text = {.s = ""};
			bool moved = kvs_pull(&pull, &text);
			ok = ok && moved;
			if (!moved)
				cr_log_info("%s", text.s);
		}
	}
	for (uint32_t d = 0; d < fleet->shape.decode_tp; d++)
		fleet_close(fleet, d, room, ok ? KVS_ROOM_SUCCESS : KVS_ROOM_FAILURE);
	return ok;
}
