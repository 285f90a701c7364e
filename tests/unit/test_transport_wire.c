/* SPDX-License-Identifier: Apache-2.0 */
/* The control messages: round trips, every truncation, limits; and the digests that the challenge is made of. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/shapes.h"
#include "transport/message.h"
#include "transport/sha256.h"
#include "transport/transport.h"

static const uint8_t key[KVS_KEY_SIZE] = {1, 2, 3};

static void expect_hex(const uint8_t *digest, const char *hex)
{
	char text[2 * KVS_SHA256_SIZE + 1];
	for (int i = 0; i < KVS_SHA256_SIZE; i++)
		(void)snprintf(text + 2 * i, 3, "%02x", digest[i]);
	cr_expect_str_eq(text, hex);
}

/* FIPS 180-4 and RFC 4231 examples. */
Test(transport_wire, digests)
{
	struct kvs_sha256 sha;
	uint8_t digest[KVS_SHA256_SIZE], long_key[131];
	kvs_sha256_begin(&sha);
	kvs_sha256_end(&sha, digest);
	expect_hex(digest, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
	kvs_sha256_begin(&sha);
	kvs_sha256_add(&sha, "abc", 3);
	kvs_sha256_end(&sha, digest);
	expect_hex(digest, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
	kvs_sha256_begin(&sha);
	kvs_sha256_add(&sha, "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56);
	kvs_sha256_end(&sha, digest);
	expect_hex(digest, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
	kvs_hmac_sha256("Jefe", 4, "what do ya want for nothing?", 28, digest);
	expect_hex(digest, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
	memset(long_key, 0xaa, sizeof(long_key));
	kvs_hmac_sha256(long_key, sizeof(long_key), "Test Using Larger Than Block-Size Key - Hash Key First", 54,
	                digest);
	expect_hex(digest, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
	cr_expect(kvs_equal_constant_time("abc", "abc", 3) && !kvs_equal_constant_time("abc", "abd", 3));
}

Test(transport_wire, headers)
{
	struct kvs_wire_header header;
	struct kvs_text text;
	kvs_wire_header_init(&header, KVS_MESSAGE_PULL, 100, key);
	cr_assert(kvs_wire_header_check(&header, key, &text));
	header.magic++;
	cr_expect(!kvs_wire_header_check(&header, key, &text));
	kvs_wire_header_init(&header, KVS_MESSAGE_PULL, 100, key);
	header.version++;
	cr_expect(!kvs_wire_header_check(&header, key, &text) && strstr(text.s, "version 2") != NULL);
	kvs_wire_header_init(&header, 99, 100, key);
	cr_expect(!kvs_wire_header_check(&header, key, &text));
	kvs_wire_header_init(&header, KVS_MESSAGE_DONE, KVS_WIRE_SMALL + 1, key);
	cr_expect(!kvs_wire_header_check(&header, key, &text) && strstr(text.s, "at most 4096") != NULL, "%s", text.s);
	kvs_wire_header_init(&header, KVS_MESSAGE_DONE, 10, key);
	header.key[15] ^= 1;
	cr_expect(!kvs_wire_header_check(&header, key, &text) && strstr(text.s, "key") != NULL);
}

static struct kvs_layout *make_layout(void)
{
	struct kvs_layout *layout = shape_layout(2, 1, 16, 2);
	shape_component(layout, 0, "kv", KVS_ORDER_NHD, 3, 4096, 2048, 10);
	shape_component(layout, 1, "swa", KVS_ORDER_HND, 2, 8192, 8192, 4);
	shape_layer_ids(layout, 0, 3, 5);
	layout->components[0].tensors[0].address = 0x1000;
	return layout;
}

Test(transport_wire, layout_round_trip)
{
	struct kvs_layout *layout = make_layout();
	struct kvs_writer writer = {.data = NULL};
	struct kvs_text text = {.s = ""};
	kvs_put_layout(&writer, layout);
	cr_assert(!writer.failed);
	struct kvs_reader reader = {.data = writer.data, .left = writer.size};
	struct kvs_layout *got = kvs_get_layout(&reader, &text);
	cr_assert(got != NULL, "%s", text.s);
	cr_expect(reader.left == 0 && got->tp_size == 2 && got->tp_rank == 1 && got->component_count == 2);
	cr_expect_str_eq(got->dtype, layout->dtype);
	cr_expect(got->components[0].tensors[0].address == 0, "addresses are nobody else's business");
	cr_expect(got->components[0].tensors[1].layer_id == 6 && got->components[1].order == KVS_ORDER_HND);
	cr_expect(got->components[1].tensors[3].length == 4 * 8192);
	kvs_layout_free(got);
	for (size_t size = 0; size < writer.size; size++) {
		uint8_t *data = malloc(size + 1);
		memcpy(data, writer.data, size);
		reader = (struct kvs_reader){.data = data, .left = size};
		cr_expect(kvs_get_layout(&reader, &text) == NULL, "%zu bytes", size);
		free(data);
	}
	free(writer.data);
	kvs_layout_free(layout);
}

/* Counts that announce more than a message can hold are refused before memory is asked for. */
Test(transport_wire, layout_with_huge_counts)
{
	struct kvs_layout *layout = make_layout();
	struct kvs_writer writer = {.data = NULL};
	struct kvs_text text;
	kvs_put_layout(&writer, layout);
	size_t component_count = 5 * 4 + KVS_NAME_SIZE + 4, tensor_count = component_count + 4 + KVS_NAME_SIZE + 4;
	uint32_t huge = UINT32_MAX;
	memcpy(writer.data + tensor_count, &huge, 4);
	struct kvs_reader reader = {.data = writer.data, .left = writer.size};
	cr_expect(kvs_get_layout(&reader, &text) == NULL);
	memcpy(writer.data + component_count, &huge, 4);
	reader = (struct kvs_reader){.data = writer.data, .left = writer.size};
	cr_expect(kvs_get_layout(&reader, &text) == NULL);
	free(writer.data);
	kvs_layout_free(layout);
}

Test(transport_wire, pull_round_trip)
{
	static const int32_t src[3] = {1, 2, 3}, dst[2] = {9, 8};
	struct kvs_msg_pull msg = {.request = 1,
	                           .room = 2,
	                           .generation = 3,
	                           .prefill_rank = 4,
	                           .chunk = 5,
	                           .component = 6,
	                           .src_count = 3,
	                           .dst_count = 2,
	                           .src_items = src,
	                           .dst_items = dst},
	                    got;
	struct kvs_writer writer = {.data = NULL};
	struct kvs_text text;
	kvs_put_pull(&writer, &msg);
	struct kvs_reader reader = {.data = writer.data, .left = writer.size};
	cr_assert(kvs_get_pull(&reader, &got, &text));
	cr_expect(got.room == 2 && got.chunk == 5 && got.component == 6 && got.src_items[2] == 3 &&
	          got.dst_items[1] == 8);
	free((void *)(uintptr_t)got.src_items);
	for (size_t size = 0; size < writer.size; size++) {
		reader = (struct kvs_reader){.data = writer.data, .left = size};
		cr_expect(!kvs_get_pull(&reader, &got, &text), "%zu bytes", size);
	}
	kvs_put_u32(&writer, 0);
	reader = (struct kvs_reader){.data = writer.data, .left = writer.size};
	cr_expect(!kvs_get_pull(&reader, &got, &text), "bytes behind the lists");
	uint32_t huge = 0x40000000;
	memcpy(writer.data + 36, &huge, 4);
	memcpy(writer.data + 40, &huge, 4);
	reader = (struct kvs_reader){.data = writer.data, .left = writer.size};
	cr_expect(!kvs_get_pull(&reader, &got, &text), "counts whose sum of bytes wraps in 32 bits");
	free(writer.data);
}

Test(transport_wire, texts_are_one_clean_line)
{
	struct kvs_writer writer = {.data = NULL};
	struct kvs_msg_end end;
	struct kvs_text text;
	kvs_put_end(&writer, 1, 0, "two\nlines\x1b[2J");
	struct kvs_reader reader = {.data = writer.data, .left = writer.size};
	cr_assert(kvs_get_end(&reader, &end, &text));
	cr_expect_str_eq(end.text.s, "two?lines?[2J");
	uint32_t long_text = KVS_TEXT_SIZE;
	memcpy(writer.data + 16, &long_text, 4);
	reader = (struct kvs_reader){.data = writer.data, .left = writer.size};
	cr_expect(!kvs_get_end(&reader, &end, &text));
	free(writer.data);
}

Test(transport_wire, transport_order)
{
	uint32_t order[KVS_TRANSPORT_COUNT];
	struct kvs_text text;
	cr_expect(kvs_transport_order("tcp, host", order, &text) == 2 && order[0] == KVS_TRANSPORT_TCP &&
	          order[1] == KVS_TRANSPORT_HOST);
	cr_expect(kvs_transport_order("cuda_ipc,rdma,host,tcp,engine", order, &text) == 5);
	cr_expect(kvs_transport_order("", order, &text) == 0);
	cr_expect(kvs_transport_order("tcp,tcp", order, &text) == 0 && strstr(text.s, "twice") != NULL);
	cr_expect(kvs_transport_order("ucx", order, &text) == 0 && strstr(text.s, "'ucx'") != NULL);
}
