/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What SGLang's connectors share: their managers, index lists and messages as neutral requests. Everything here is
 * called with the interpreter lock held and leaves no Python exception set, unless a function says otherwise.
 */
#ifndef KVS_CONNECTORS_SGLANG_H
#define KVS_CONNECTORS_SGLANG_H

#include "../../transport/agent.h"
#include "../python/api.h"

/* ---- index lists ---- */

/*
 * Item indexes from a numpy array of 4 or 8 byte integers, a host tensor, or a sequence of integers; None is an empty
 * list. The caller frees *items_p. False with text: another type, or a value that is no index.
 */
bool kvs_sglang_items(KvsPyObject *object, int32_t **items_p, uint32_t *count_p, struct kvs_text *text);

/* ---- managers ---- */

/* What we keep for one manager object, owned by a capsule in its attribute; lives as long as the object. */
struct kvs_manager {
	uint64_t endpoint; /* 0: the stock path, this manager is not ours */
	enum kvs_role role;
	struct kvs_layout *layout;
	uint32_t splice_equal; /* bit c: component c is ours at equal TP as well */
};

/* What a connector sends wrong at equal TP: components that are ours there whatever the policy, unless it is off. */
#define KVS_UNEVEN_KV    1u /* a KV pool whose buffers differ in item length */
#define KVS_UNEVEN_STATE 2u /* a head-sharded state component whose V buffers differ from its K buffers */

/*
 * Describe the manager's kv_args and register it with the agent, starting it if need be. A manager that is not ours
 * (MLA, policy off, memory that makes no sense) is left alone, with one line in the log that says why. uneven: of
 * KVS_UNEVEN_*, 0 where the connector does each buffer by its own length.
 */
void kvs_sglang_register(KvsPyObject *manager, uint32_t uneven);

/* Is this component ours at equal TP? */
bool kvs_sglang_splices_equal(const struct kvs_manager *m, uint32_t component);

/* What kvs_sglang_register made; NULL: nothing, or removed. */
struct kvs_manager *kvs_sglang_manager(KvsPyObject *manager);

/* Forget the manager's memory before its owner does. Releases the interpreter lock while waiting. */
void kvs_sglang_unregister(KvsPyObject *manager);

/* The StateType value of state component index (0-based), as text. */
bool kvs_sglang_state_type(KvsPyObject *manager, uint32_t index, char name_p[KVS_NAME_SIZE]);

/* ---- messages ---- */

/*
 * Our frame travels behind SGLang's own, at index KVS_FRAME_INDEX with empty frames before it: every release reads an
 * empty frame as an absent one, and none reads as far as this. (nixl and mori take a guard frame off the front before
 * they parse a message: there it is one less.)
 */
#define KVS_FRAME_INDEX 49

/* While a message context is entered, sockets handed out by kvs_sglang_connect on this thread add its frame. */
struct kvs_frame {
	uint8_t bytes[KVS_RECORD_MAX];
	size_t size;
};
void kvs_sglang_frame_enter(const struct kvs_frame *frame);
void kvs_sglang_frame_leave(void);

/* Replacement for the class method _connect_to_bootstrap_server: (socket, lock), new; NULL with the exception set. */
KvsPyObject *kvs_sglang_connect(KvsPyObject *original, KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs);

/*
 * If the message (a list of bytes) ends in a frame of ours, copy it out and return a new list without it; else NULL,
 * and the message is to be used as it is.
 */
KvsPyObject *kvs_sglang_take_frame(KvsPyObject *message, struct kvs_frame *frame_p);

/* The metadata message's frame: the room's generation at the decode's agent. */
void kvs_sglang_generation_frame(uint64_t generation, struct kvs_frame *frame_p);
bool kvs_sglang_generation(const struct kvs_frame *frame, uint64_t *generation_p);

/* Once per connector module: what the functions above need from the interpreter. False: not available. */
bool kvs_sglang_prepare(void);

/* ---- small things ---- */

/* A new types.SimpleNamespace; NULL with the exception set. */
KvsPyObject *kvs_sglang_namespace(void);

/* Set a RuntimeError. */
void kvs_sglang_raise(const char *text);

/* The name of our capsules. */
#define KVS_CAPSULE "kvsplice"

/* What kvs_sglang_attach put there; NULL when absent. */
void *kvs_sglang_attached(KvsPyObject *object, const char *attribute);

/* Attach pointer to object; destroy(pointer) runs when the object goes. False: destroy has run already. */
bool kvs_sglang_attach(KvsPyObject *object, const char *attribute, void *pointer,
                       void (*destroy)(KvsPyObject *capsule));

/* The room number of a sender, receiver, or request (attribute name); 0 and false when it has none. */
bool kvs_sglang_room(KvsPyObject *object, const char *attribute, uint64_t *room_p);

/* manager.record_failure(room, text); a failing call is logged and dropped. */
void kvs_sglang_record_failure(KvsPyObject *manager, uint64_t room, const char *text);

#endif
