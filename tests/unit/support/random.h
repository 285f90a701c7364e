/* SPDX-License-Identifier: Apache-2.0 */
/* A repeatable stream of numbers: the same seed gives the same tests on every machine. */
#ifndef KVS_TEST_RANDOM_H
#define KVS_TEST_RANDOM_H

#include <stdint.h>

/* splitmix64's finaliser: spreads every bit of the input over the result. */
static inline uint64_t test_mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15U;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
	x = (x ^ x >> 27) * 0x94d049bb133111ebU;
	return x ^ x >> 31;
}

static inline uint64_t test_random(uint64_t *state)
{
	*state += 0x9e3779b97f4a7c15U;
	return test_mix(*state);
}

/* low .. high, both included. */
static inline uint32_t test_random_in(uint64_t *state, uint32_t low, uint32_t high)
{
	return low + (uint32_t)(test_random(state) % ((uint64_t)high - low + 1));
}

#endif
