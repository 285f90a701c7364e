/* SPDX-License-Identifier: Apache-2.0 */
/* The byte oracle over a generated sweep of shapes. */
#include <criterion/criterion.h>
#include <stdio.h>

#include "support/oracle.h"
#include "support/random.h"
#include "support/shapes.h"

#define MAX_TP    16
#define MAX_HEADS 64
#define DRAWS     16 /* per shape and order: page size, layers, widths, item lists */
/* Keeps a case small enough for thousands of them, yet well above one page of one head. */
#define MAX_CASE_BYTES 98304

struct tally {
	uint64_t cases;
	bool pages[129];
	struct oracle_sum sum;
};

static bool divides(uint32_t a, uint32_t b)
{
	return a % b == 0 || b % a == 0;
}

/* Draw what the sweep does not enumerate. */
static void draw_case(struct oracle_case *o, uint64_t *random)
{
	uint64_t items;

	o->page_size = test_random_in(random, 1, 128);
	o->layers = test_random_in(random, 1, 3);
	o->pages = test_random_in(random, 1, 6);
	o->spare = test_random_in(random, 0, 3);
	o->k_width = test_random_in(random, 1, 24);
	/* Unequal K and V two times in four, equal once, K alone once. */
	o->v_width = test_random_in(random, 0, 3);
	if (o->v_width == 1)
		o->v_width = o->k_width;
	else if (o->v_width > 1)
		o->v_width = test_random_in(random, 1, 24);
	o->seed = test_random(random);
	for (;;) {
		items = (uint64_t)o->layers * (o->pages + o->spare);
		if (items * o->page_size * o->heads * (o->k_width + o->v_width) <= MAX_CASE_BYTES)
			return;
		if (o->pages > 2)
			o->pages--;
		else if (o->layers > 1)
			o->layers--;
		else if (o->spare > 1)
			o->spare--;
		else if (o->k_width > 3)
			o->k_width /= 2;
		else if (o->v_width > 3)
			o->v_width /= 2;
		else
			return;
	}
}

static void run(struct oracle_case *o, struct tally *tally, uint64_t *random)
{
	draw_case(o, random);
	oracle_run(o, &tally->sum);
	tally->pages[o->page_size] = true;
	tally->cases++;
}

static void tell(const char *what, const struct tally *tally)
{
	uint32_t pages = 0;
	uint32_t i;

	for (i = 1; i <= 128; i++)
		pages += tally->pages[i];
	printf("policy sweep, %s: %llu cases, %u page sizes, %llu plans, %llu runs, %llu bytes moved, all right\n",
	       what, (unsigned long long)tally->cases, pages, (unsigned long long)tally->sum.plans,
	       (unsigned long long)tally->sum.runs, (unsigned long long)tally->sum.bytes);
	(void)fflush(stdout);
}

static bool model_runs(uint32_t heads, uint32_t p, uint32_t d)
{
	return divides(p, d) && shape_valid(heads, p) && shape_valid(heads, d);
}

/* Every TP pair and head count that a model can run with, each in both page orders. */
Test(policy_sweep, heads, .timeout = 240)
{
	struct tally tally = {0};
	uint64_t random = 1;
	uint32_t shapes = 0;
	uint32_t p;
	uint32_t d;
	uint32_t heads;
	uint32_t i;

	for (p = 1; p <= MAX_TP; p++) {
		for (d = 1; d <= MAX_TP; d++) {
			for (heads = 1; heads <= MAX_HEADS; heads++) {
				struct oracle_case o = {.prefill_tp = p, .decode_tp = d, .heads = heads, .type = "swa"};

				if (!model_runs(heads, p, d))
					continue;
				shapes++;
				for (i = 0; i < 2 * DRAWS; i++) {
					o.order = i % 2 ? KVS_ORDER_HND : KVS_ORDER_NHD;
					run(&o, &tally, &random);
				}
			}
		}
	}
	printf("policy sweep: %u shapes (P, D, heads)\n", shapes);
	tell("head-sharded", &tally);
	cr_assert_eq(tally.cases, (uint64_t)shapes * 2 * DRAWS);
	cr_assert_gt(shapes, 900);
}

/* Components that every rank holds whole, whatever their order is called. */
Test(policy_sweep, whole, .timeout = 240)
{
	static const char *const types[] = {"minimax_index_k", "swa_ring", "c128_state", "dsa"};
	struct tally tally = {0};
	uint64_t random = 2;
	uint32_t p;
	uint32_t d;
	uint32_t t;

	for (p = 1; p <= MAX_TP; p++) {
		for (d = 1; d <= MAX_TP; d++) {
			for (t = 0; t < 4 && divides(p, d); t++) {
				struct oracle_case o = {.prefill_tp = p, .decode_tp = d, .heads = 1, .type = types[t]};

				o.whole = true;
				o.order = KVS_ORDER_UNKNOWN;
				run(&o, &tally, &random);
			}
		}
	}
	tell("whole", &tally);
}
