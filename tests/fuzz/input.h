/* SPDX-License-Identifier: Apache-2.0 */
/* How the targets use the fuzzer's bytes. */
#ifndef KVS_FUZZ_INPUT_H
#define KVS_FUZZ_INPUT_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Stop where the fuzzer sees it. */
#define FUZZ_CHECK(condition) \
	do { \
		if (!(condition)) \
			__builtin_trap(); \
	} while (0)

struct input {
	const uint8_t *data;
	size_t size;
};

static inline uint8_t input_u8(struct input *input)
{
	if (input->size == 0)
		return 0;
	input->size--;
	return *input->data++;
}

static inline uint16_t input_u16(struct input *input)
{
	uint16_t high = input_u8(input);
	return (uint16_t)(high << 8 | input_u8(input));
}

/*
 * Change a valid body here and there and perhaps cut it: random bytes alone would hardly ever get past the first
 * counts. Returns the new size.
 */
static inline size_t input_edit(struct input *input, uint8_t *body, size_t size)
{
	uint8_t edits = input_u8(input) % 8;
	for (uint8_t i = 0; i < edits && size > 0; i++) {
		size_t at = input_u16(input) % size;
		body[at] = input_u8(input);
	}
	return input_u8(input) < 224 || size == 0 ? size : input_u16(input) % size;
}

#endif
