/* SPDX-License-Identifier: Apache-2.0 */
#include "oracle.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policy/plan.h"
#include "random.h"
#include "shapes.h"

/* One rank's memory: its tensors one after the other, each with its own allocation so that a sanitizer sees the ends.
 */
struct rank {
	struct kvs_layout *layout;
	uint8_t **tensors;
	uint8_t **expected; /* decode only */
};

struct world {
	const struct oracle_case *oracle;
	uint32_t tensor_count;
	uint32_t items;
	uint8_t **full; /* per tensor [token][head][byte] of the request's pages */
	int32_t *src_items;
	int32_t *dst_items;
	struct rank *prefill;
	struct rank *decode;
	uint64_t random;
	char name[160];
};

static uint32_t width_of(const struct oracle_case *o, uint32_t tensor)
{
	return tensor < o->layers ? o->k_width : o->v_width;
}

/* Which global head is local head 0 of this rank: QKV sharding, with replication when heads are fewer than ranks. */
static uint32_t first_head(const struct oracle_case *o, uint32_t tp_size, uint32_t rank)
{
	if (o->whole)
		return 0;
	if (tp_size <= o->heads)
		return rank * (o->heads / tp_size);
	return rank / (tp_size / o->heads);
}

static uint32_t local_heads(const struct oracle_case *o, uint32_t tp_size)
{
	return o->whole ? o->heads : shape_heads(o->heads, tp_size);
}

static void fill_random(uint8_t *bytes, size_t size, uint64_t seed)
{
	size_t i;

	for (i = 0; i < size; i += sizeof(uint64_t)) {
		uint64_t value = test_mix(seed + i);

		memcpy(bytes + i, &value, size - i < sizeof(value) ? size - i : sizeof(value));
	}
}

/* Distinct items in random order, at times with stretches that follow each other. */
static void draw_items(struct world *w, int32_t *list)
{
	uint32_t pages = w->oracle->pages;
	int32_t *all = shape_take(w->items * sizeof(*all));
	uint32_t i;

	for (i = 0; i < w->items; i++)
		all[i] = (int32_t)i;
	if (test_random(&w->random) % 3) {
		for (i = w->items - 1; i > 0; i--) {
			uint32_t j = test_random_in(&w->random, 0, i);
			int32_t swap = all[i];

			all[i] = all[j];
			all[j] = swap;
		}
	}
	memcpy(list, all, pages * sizeof(*list));
	free(all);
}

/* Deal the request's pages out into a rank's tensor, at the listed items. */
static void deal(const struct world *w, uint32_t tensor, uint32_t tp_size, uint32_t rank, const int32_t *items,
                 uint8_t *pool)
{
	const struct oracle_case *o = w->oracle;
	uint32_t width = width_of(o, tensor);
	uint32_t heads = local_heads(o, tp_size);
	uint32_t first = first_head(o, tp_size, rank);
	uint32_t page;
	uint32_t token;
	uint32_t head;

	for (page = 0; page < o->pages; page++) {
		uint8_t *item = pool + (size_t)items[page] * o->page_size * heads * width;

		for (token = 0; token < o->page_size; token++) {
			for (head = 0; head < heads; head++) {
				size_t place = o->order == KVS_ORDER_HND ? (size_t)head * o->page_size + token
				                                         : (size_t)token * heads + head;
				size_t global = ((size_t)page * o->page_size + token) * o->heads + first + head;

				memcpy(item + place * width, w->full[tensor] + global * width, width);
			}
		}
	}
}

static size_t pool_size(const struct world *w, uint32_t tensor, uint32_t tp_size)
{
	return (size_t)w->items * w->oracle->page_size * local_heads(w->oracle, tp_size) * width_of(w->oracle, tensor);
}

static void rank_make(struct world *w, struct rank *r, uint32_t tp_size, uint32_t rank, bool is_decode)
{
	const struct oracle_case *o = w->oracle;
	uint64_t token = (uint64_t)o->page_size * local_heads(o, tp_size);
	uint32_t i;

	r->layout = shape_layout(tp_size, rank, o->page_size, 1);
	shape_component(r->layout, 0, o->type, o->order, o->layers, token * o->k_width, token * o->v_width, w->items);
	r->tensors = shape_take(w->tensor_count * sizeof(*r->tensors));
	r->expected = is_decode ? shape_take(w->tensor_count * sizeof(*r->expected)) : NULL;
	for (i = 0; i < w->tensor_count; i++) {
		size_t size = pool_size(w, i, tp_size);

		r->tensors[i] = shape_take(size);
		fill_random(r->tensors[i], size, test_random(&w->random));
		r->layout->components[0].tensors[i].address = (uintptr_t)r->tensors[i];
		if (!is_decode) {
			deal(w, i, tp_size, rank, w->src_items, r->tensors[i]);
			continue;
		}
		r->expected[i] = shape_take(size);
		memcpy(r->expected[i], r->tensors[i], size);
		deal(w, i, tp_size, rank, w->dst_items, r->expected[i]);
	}
}

static void rank_free(const struct world *w, struct rank *r)
{
	uint32_t i;

	for (i = 0; i < w->tensor_count; i++) {
		free(r->tensors[i]);
		if (r->expected)
			free(r->expected[i]);
	}
	free(r->tensors);
	free(r->expected);
	kvs_layout_free(r->layout);
}

static void world_make(struct world *w, const struct oracle_case *o)
{
	uint32_t i;

	memset(w, 0, sizeof(*w));
	w->oracle = o;
	w->random = o->seed;
	w->tensor_count = o->v_width ? 2 * o->layers : o->layers;
	w->items = o->pages + o->spare;
	(void)snprintf(w->name, sizeof(w->name),
	               "%s P=%u D=%u heads=%u layers=%u page=%u pages=%u+%u widths=%u/%u order=%d seed=0x%llx", o->type,
	               o->prefill_tp, o->decode_tp, o->heads, o->layers, o->page_size, o->pages, o->spare, o->k_width,
	               o->v_width, (int)o->order, (unsigned long long)o->seed);
	w->full = shape_take(w->tensor_count * sizeof(*w->full));
	for (i = 0; i < w->tensor_count; i++) {
		size_t size = (size_t)o->pages * o->page_size * o->heads * width_of(o, i);

		w->full[i] = shape_take(size);
		fill_random(w->full[i], size, test_random(&w->random));
	}
	w->src_items = shape_take(o->pages * sizeof(*w->src_items));
	w->dst_items = shape_take(o->pages * sizeof(*w->dst_items));
	draw_items(w, w->src_items);
	draw_items(w, w->dst_items);
	w->prefill = shape_take(o->prefill_tp * sizeof(*w->prefill));
	w->decode = shape_take(o->decode_tp * sizeof(*w->decode));
	for (i = 0; i < o->prefill_tp; i++)
		rank_make(w, &w->prefill[i], o->prefill_tp, i, false);
	for (i = 0; i < o->decode_tp; i++)
		rank_make(w, &w->decode[i], o->decode_tp, i, true);
}

static void world_free(struct world *w)
{
	uint32_t i;

	for (i = 0; i < w->oracle->prefill_tp; i++)
		rank_free(w, &w->prefill[i]);
	for (i = 0; i < w->oracle->decode_tp; i++)
		rank_free(w, &w->decode[i]);
	for (i = 0; i < w->tensor_count; i++)
		free(w->full[i]);
	free(w->full);
	free(w->src_items);
	free(w->dst_items);
	free(w->prefill);
	free(w->decode);
}

static void run_check(const struct world *w, const struct kvs_component *component, uint32_t tensor, uint64_t address,
                      uint64_t len, const char *side)
{
	const struct kvs_tensor *t = &component->tensors[tensor];

	if (len && address >= t->address && len <= t->length && address - t->address <= t->length - len)
		return;
	cr_assert_fail("%s: a run of %llu bytes leaves %s tensor %u", w->name, (unsigned long long)len, side, tensor);
}

/* One request's part of the pages, on its way. */
struct room {
	struct kvs_plan *plan;
	struct kvs_plan_iter iter;
	uint64_t bytes;
	uint64_t runs;
};

static void room_open(struct world *w, const struct rank *p, const struct rank *d, uint32_t index, struct room *room_p)
{
	uint32_t rooms = w->oracle->rooms ? w->oracle->rooms : 1;
	uint32_t first = index * w->oracle->pages / rooms;
	uint32_t count = (index + 1) * w->oracle->pages / rooms - first;
	struct kvs_verdict verdict;

	memset(room_p, 0, sizeof(*room_p));
	if (!kvs_plan_build(p->layout, d->layout, 0, w->src_items + first, count, w->dst_items + first, count,
	                    &room_p->plan, &verdict))
		cr_assert_fail("%s: refused: %s", w->name, verdict.text.s);
	kvs_plan_seek(&room_p->iter, room_p->plan, 0);
}

/* Copy one piece of a room; false: it has all. */
static bool room_step(const struct world *w, const struct rank *p, const struct rank *d, struct room *room,
                      uint64_t limit)
{
	struct kvs_run run;

	if (!kvs_plan_next(&room->iter, limit, &run))
		return false;
	run_check(w, &p->layout->components[0], run.src_tensor, run.src, run.len, "prefill");
	run_check(w, &d->layout->components[0], run.dst_tensor, run.dst, run.len, "decode");
	/* The addresses are those of this process's own buffers, checked above. */
	memcpy((void *)(uintptr_t)run.dst, (const void *)(uintptr_t)run.src, run.len);
	room->bytes += run.len;
	room->runs++;
	return true;
}

static void room_close(const struct world *w, struct room *room, uint64_t limit, struct oracle_sum *sum_p)
{
	const struct kvs_plan *plan = room->plan;

	if (room->bytes != plan->bytes || (limit == UINT64_MAX && room->runs != plan->runs))
		cr_assert_fail("%s: the plan says %llu bytes in %llu runs, the walk gave %llu in %llu", w->name,
		               (unsigned long long)plan->bytes, (unsigned long long)plan->runs,
		               (unsigned long long)room->bytes, (unsigned long long)room->runs);
	sum_p->bytes += plan->bytes;
	sum_p->runs += plan->runs;
	sum_p->copies += plan->copy_count;
	sum_p->plans++;
	kvs_plan_free(room->plan);
}

/* One prefill rank's share of one decode rank, with a limit in half of the cases, so that runs are cut anywhere. */
static void serve(struct world *w, uint32_t prefill_rank, uint32_t decode_rank, struct oracle_sum *sum_p)
{
	uint64_t limit = test_random(&w->random) % 2 ? UINT64_MAX : test_random_in(&w->random, 16, 4096);
	uint32_t count = w->oracle->rooms ? w->oracle->rooms : 1;
	const struct rank *p = &w->prefill[prefill_rank];
	const struct rank *d = &w->decode[decode_rank];
	struct room rooms[ORACLE_MAX_ROOMS];
	bool more = true;
	uint32_t i;

	cr_assert_leq(count, ORACLE_MAX_ROOMS);
	for (i = 0; i < count; i++)
		room_open(w, p, d, i, &rooms[i]);
	while (more) {
		more = false;
		for (i = 0; i < count; i++)
			more |= room_step(w, p, d, &rooms[i], limit);
	}
	for (i = 0; i < count; i++)
		room_close(w, &rooms[i], limit, sum_p);
}

static void decode_check(const struct world *w, uint32_t rank, uint64_t bytes)
{
	const struct oracle_case *o = w->oracle;
	const struct rank *d = &w->decode[rank];
	uint64_t listed = 0;
	uint32_t i;

	for (i = 0; i < w->tensor_count; i++) {
		size_t size = pool_size(w, i, o->decode_tp);
		size_t at = 0;

		listed += size / w->items * o->pages;
		if (!memcmp(d->tensors[i], d->expected[i], size))
			continue;
		while (d->tensors[i][at] == d->expected[i][at])
			at++;
		cr_assert_fail("%s: decode rank %u tensor %u byte %zu is 0x%02x, not 0x%02x", w->name, rank, i, at,
		               d->tensors[i][at], d->expected[i][at]);
	}
	/* All right and no more bytes than there are: nothing was sent twice. */
	if (bytes != listed)
		cr_assert_fail("%s: %llu bytes moved to decode rank %u, which has %llu", w->name,
		               (unsigned long long)bytes, rank, (unsigned long long)listed);
}

void oracle_run(const struct oracle_case *oracle, struct oracle_sum *sum_p)
{
	uint32_t sources = oracle->prefill_tp > oracle->decode_tp ? oracle->prefill_tp / oracle->decode_tp : 1;
	struct world w;
	uint32_t d;
	uint32_t i;

	world_make(&w, oracle);
	for (d = 0; d < oracle->decode_tp; d++) {
		uint32_t first = d * oracle->prefill_tp / oracle->decode_tp;
		uint64_t before = sum_p->bytes;

		for (i = 0; i < sources; i++)
			serve(&w, first + i, d, sum_p);
		decode_check(&w, d, sum_p->bytes - before);
	}
	world_free(&w);
}
