/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A decode's agent that is handed whatever a prefill could send once its handshake is over: control messages in any
 * order, and any content of the shared staging memory. Registered memory lies between two guards, and only the items
 * that the receiver published may change.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "input.h"
#include "transport/link.h"

#define ITEM_LEN 256u
#define ITEMS    8u
#define CANARY   0x5a
#define ROOM     7u

static const int32_t published[] = {1, 2, 5};
static const int32_t sources[] = {0, 1, 2};

/* Two tensors, each with as much in front of it and behind it. */
static uint8_t memory[2][3 * ITEM_LEN * ITEMS];

/* Both ends of one shared memory, made once and emptied for each input. */
static struct kvs_staging consumer, producer;

static void make_staging(void)
{
	int fds[3];
	if (consumer.shared == NULL) {
		FUZZ_CHECK(kvs_staging_create(&consumer, 0, NULL));
		fds[0] = dup(consumer.memory);
		fds[1] = dup(consumer.data);
		fds[2] = dup(consumer.space);
		FUZZ_CHECK(kvs_staging_map(&producer, fds, consumer.slot_count, consumer.slot_size, NULL));
	}
	memset(consumer.shared, 0, (size_t)(consumer.slots - (uint8_t *)consumer.shared));
	producer.index = 0;
}

static struct kvs_layout *make_layout(uint32_t tp_size, bool ours)
{
	struct kvs_layout *layout = kvs_layout_new(1);
	FUZZ_CHECK(layout != NULL && kvs_layout_set_tensors(layout, 0, 2));
	layout->tp_size = tp_size;
	layout->pp_size = 1;
	layout->page_size = 4;
	memcpy(layout->dtype, "bfloat16", 9);
	memcpy(layout->components[0].type, "kv", 3);
	layout->components[0].order = KVS_ORDER_NHD;
	for (uint32_t t = 0; t < 2; t++) {
		struct kvs_tensor *tensor = &layout->components[0].tensors[t];
		tensor->item_len = ITEM_LEN / tp_size;
		tensor->length = tensor->item_len * ITEMS;
		tensor->address = ours ? (uint64_t)(uintptr_t)(memory[t] + ITEM_LEN * ITEMS) : 0;
		tensor->layer_id = KVS_NO_LAYER;
	}
	FUZZ_CHECK(kvs_layout_check(layout, NULL));
	return layout;
}

static struct kvs_endpoint *make_endpoint(void)
{
	struct kvs_endpoint *endpoint = calloc(1, sizeof(*endpoint));
	FUZZ_CHECK(endpoint != NULL);
	endpoint->refs = 1;
	endpoint->id = ++kvs_state.last_id;
	endpoint->role = KVS_ROLE_DECODE;
	endpoint->layout = make_layout(1, true);
	endpoint->next = kvs_state.endpoints;
	kvs_state.endpoints = endpoint;
	return endpoint;
}

/* A link as it is after the handshake with prefill rank 0 of 2. */
static struct kvs_link *make_link(struct kvs_endpoint *endpoint, int fd)
{
	struct kvs_link *link = kvs_link_new(KVS_ROLE_DECODE, fd, kvs_state.key);
	FUZZ_CHECK(link != NULL);
	link->state = KVS_LINK_READY;
	link->is_unix = true;
	link->endpoint = endpoint;
	endpoint->refs++;
	link->peer_layout = make_layout(2, false);
	link->route[link->route_count++] = KVS_TRANSPORT_HOST;
	FUZZ_CHECK(kvs_link_judge(link));
	make_staging();
	link->staging = consumer;
	FUZZ_CHECK(kvs_watch_add(fd, EPOLLIN, KVS_WATCH_LINK, link->id));
	link->events = EPOLLIN;
	return link;
}

static void drain(int fd)
{
	uint8_t bytes[4096];
	while (recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
		;
}

static void send_message(struct kvs_link *link, struct input *input)
{
	static const uint16_t types[] = {KVS_MESSAGE_PULL,         KVS_MESSAGE_PULL, KVS_MESSAGE_CANCEL,
	                                 KVS_MESSAGE_ROUTE_FAILED, KVS_MESSAGE_FAIL, KVS_MESSAGE_HELLO};
	uint16_t type = types[input_u8(input) % 6];
	struct kvs_writer writer = {.data = NULL};
	struct kvs_msg_pull pull = {.request = input_u8(input) % 4,
	                            .room = ROOM,
	                            .src_count = 3,
	                            .dst_count = 3,
	                            .src_items = sources,
	                            .dst_items = published};
	if (type == KVS_MESSAGE_PULL)
		kvs_put_pull(&writer, &pull);
	else if (type == KVS_MESSAGE_FAIL)
		kvs_put_fail(&writer, ROOM, 0, "because");
	else
		kvs_put_end(&writer, input_u8(input) % 4, input_u8(input) % 4, "because");
	size_t size = input_edit(input, writer.data, writer.size);
	struct kvs_reader body = {.data = writer.data, .left = size};
	kvs_decode_message(link, type, &body);
	free(writer.data);
}

/* As a prefill would, or not: any index, any mark, any bytes. */
static void write_staging(struct input *input)
{
	uint8_t *slot;
	uint8_t how = input_u8(input);
	if (how < 16)
		producer.index += input_u16(input);
	if (kvs_staging_empty(&producer, &slot) == KVS_SLOT_READY)
		memset(slot, input_u8(input), 64);
	uint32_t length = input_u16(input);
	kvs_staging_commit(&producer, input_u8(input) % 4, how < 128 ? 3 * 2 * ITEM_LEN / 2 : length);
}

static void check_memory(void)
{
	for (uint32_t t = 0; t < 2; t++) {
		for (uint32_t i = 0; i < 3 * ITEMS; i++) {
			bool may = i == ITEMS + 1 || i == ITEMS + 2 || i == ITEMS + 5;
			for (uint32_t b = 0; b < ITEM_LEN && !may; b++)
				FUZZ_CHECK(memory[t][i * ITEM_LEN + b] == CANARY);
		}
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input input = {.data = data, .size = size};
	struct kvs_item_list list = {.items = published, .count = 3};
	int pair[2];
	memset(memory, CANARY, sizeof(memory));
	if (kvs_state.epoll < 0)
		kvs_state.epoll = epoll_create1(EPOLL_CLOEXEC);
	FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
	struct kvs_endpoint *endpoint = make_endpoint();
	FUZZ_CHECK(kvs_room_open(endpoint->id, ROOM, &list, 1, NULL) != 0);
	kvs_lock();
	struct kvs_link *link = make_link(endpoint, pair[0]);
	while (input.size > 0 && !link->drop) {
		uint8_t what = input_u8(&input);
		if (what < 100)
			send_message(link, &input);
		else if (what < 200)
			write_staging(&input);
		else
			(void)kvs_flights_serve();
		drain(pair[1]);
	}
	for (int i = 0; i < 8 && !link->drop; i++)
		(void)kvs_flights_serve();
	check_memory();
	kvs_staging_init(&link->staging); /* it is not the link's to drop */
	endpoint->removed = true;
	kvs_links_reap();
	kvs_unlock();
	kvs_room_close(endpoint->id, ROOM, KVS_ROOM_FAILURE);
	kvs_lock();
	FUZZ_CHECK(kvs_state.links == NULL && kvs_state.endpoints == endpoint);
	kvs_state.endpoints = endpoint->next;
	kvs_endpoint_unref(endpoint);
	kvs_unlock();
	close(pair[1]);
	return 0;
}
