/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The prefill side as SGLang's connectors have it in common: registration infos in decode_kv_args_table, transfer infos
 * in transfer_infos[room][key], where the key names a decode rank (mooncake's session, nixl's agent, mori's engine).
 * Interpreter lock held; no exception is left set unless a function says otherwise.
 */
#ifndef KVS_CONNECTORS_PREFILL_H
#define KVS_CONNECTORS_PREFILL_H

#include "rooms.h"
#include "splice.h"

/*
 * from_zmq of the registration and of the metadata message, whose only parameter is called parameter: the original gets
 * the message without our frame, which is stored with the result. On the bootstrap thread, which must neither fail nor
 * wait. The result and the exception are the original's.
 */
KvsPyObject *kvs_prefill_register_info(const struct kvs_replaced *call, const char *parameter, KvsPyObject *info_class);
KvsPyObject *kvs_prefill_transfer_info(const struct kvs_replaced *call, const char *parameter, KvsPyObject *info_class);

/* The argument of this name, by its position in the original; borrowed; NULL when not given. */
KvsPyObject *kvs_prefill_argument(const struct kvs_replaced *call, const char *name);

/* The registration info of the decode rank called key, new; NULL: not registered. */
KvsPyObject *kvs_prefill_peer(KvsPyObject *manager, KvsPyObject *key);

/*
 * The transfer info of that decode rank whose attribute is this object, or the array that it is a view of, new. Calls
 * that name no room are given their destination lists, or slices of them, by the worker (0.5.12 to 0.5.23). NULL: none.
 */
KvsPyObject *kvs_prefill_request(KvsPyObject *manager, KvsPyObject *key, const char *attribute, KvsPyObject *object);

/*
 * The transfer info of that decode rank whose attribute has this number, the newest where an ended room still has it;
 * new. NULL: none.
 */
KvsPyObject *kvs_prefill_request_numbered(KvsPyObject *manager, KvsPyObject *key, const char *attribute,
                                          int64_t number);

/*
 * Is the full-attention KV that goes to this decode rank ours? At equal TP only with policy all, or where the connector
 * itself would send wrong bytes; with policy refused, and on a pipeline stage whose release gives no layer ids, only
 * where upstream's own slicing, which has one item length for all buffers and, on several releases, the wrong head with
 * more ranks than KV heads, is not right.
 */
bool kvs_prefill_kv_is_ours(KvsPyObject *manager, KvsPyObject *info);

/*
 * One chunk of full-attention KV for the decode rank called key: manager, info (may be NULL), the item lists and bare
 * of send are used; its request, found by the destination list, is filled with a new reference, which the caller drops.
 */
enum kvs_sent kvs_prefill_send_kv(struct kvs_send *send, KvsPyObject *key);

/* Did this transfer info's room fail, or was it cancelled? */
bool kvs_prefill_failed(KvsPyObject *manager, KvsPyObject *request);

/* Set a RuntimeError with the reason of that room's failure. */
void kvs_prefill_raise(KvsPyObject *manager, KvsPyObject *request);

/* Does this release slice, or copy, a state component of this type itself, and rightly? */
typedef bool (*kvs_sends_state_t)(KvsPyObject *manager, const char *type);

/*
 * Component index (0-based among the state components) is in place. Called when all that are ours are: nixl's decode
 * takes the first notification of a rank for all of its state. False, with the exception set, ends the loop.
 */
typedef bool (*kvs_state_done_t)(const struct kvs_replaced *call, uint32_t index);

struct kvs_states {
	const struct kvs_replaced *call;
	struct kvs_send send;   /* manager, info, request and bare are used */
	KvsPyObject *rest;      /* list, a copy of the call's source index lists; an entry that is ours becomes None */
	KvsPyObject *dst_lists; /* the destination index lists */
	kvs_sends_state_t slices; /* ours nevertheless, unless only what is refused is */
	kvs_sends_state_t copies; /* whole items, which cannot be bettered: left to it. May be NULL */
	kvs_state_done_t done;    /* may be NULL */
};

/*
 * Send what is ours of a request's state and strike it from the rest: every release skips a component whose entry is
 * None. A component that upstream would skip, with no source item, is left in it. left_p: is anything left for the
 * original? A room that has failed has nothing left. False: done ended it, its exception is set.
 */
bool kvs_prefill_states(struct kvs_states *states, bool *left_p);

#endif
