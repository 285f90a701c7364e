/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA driver, opened at run time, and only where the process has loaded it itself: a process without it has no
 * device memory. No header and no library of CUDA is needed to build. tests/cuda/check_functions.c compares every
 * prototype below with cuda.h where that is installed.
 */
#ifndef KVS_TRANSPORT_CUDA_DRIVER_H
#define KVS_TRANSPORT_CUDA_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../policy/text.h"
#include "cuda_types.h"

/* The interface that is asked for, and with it the oldest driver: 12.0 brought cuGetProcAddress as it is used here. */
#define KVS_CUDA_VERSION 12000

typedef unsigned kvs_cu_result;
typedef int kvs_cu_device;
typedef unsigned long long kvs_cu_pointer;
typedef unsigned long long kvs_cu_handle; /* of physical memory */
typedef struct CUctx_st *kvs_cu_context;
typedef struct CUstream_st *kvs_cu_stream;
typedef struct CUevent_st *kvs_cu_event;
typedef struct CUmod_st *kvs_cu_module;
typedef struct CUfunc_st *kvs_cu_function;
typedef void (*kvs_cu_host_function)(void *data);

/* Name in the driver without its "cu", parameters. All of them are required and return kvs_cu_result. */
#define KVS_CUDA_FUNCTIONS(X) \
	X(GetErrorName, (kvs_cu_result error, const char **name_p)) \
	X(DeviceGet, (kvs_cu_device * device_p, int ordinal)) \
	X(DeviceGetCount, (int *count_p)) \
	X(DeviceGetUuid, (struct kvs_cu_uuid * uuid_p, kvs_cu_device device)) \
	X(DeviceGetAttribute, (int *value_p, unsigned attribute, kvs_cu_device device)) \
	X(DeviceCanAccessPeer, (int *can_p, kvs_cu_device device, kvs_cu_device peer)) \
	X(DevicePrimaryCtxGetState, (kvs_cu_device device, unsigned *flags_p, int *active_p)) \
	X(DevicePrimaryCtxRetain, (kvs_cu_context * context_p, kvs_cu_device device)) \
	X(DevicePrimaryCtxRelease, (kvs_cu_device device)) \
	X(CtxPushCurrent, (kvs_cu_context context)) \
	X(CtxPopCurrent, (kvs_cu_context * context_p)) \
	X(CtxGetDevice, (kvs_cu_device * device_p)) \
	X(CtxGetStreamPriorityRange, (int *least_p, int *greatest_p)) \
	X(PointerGetAttribute, (void *value_p, unsigned attribute, kvs_cu_pointer pointer)) \
	X(PointerGetAttributes, (unsigned count, unsigned *attributes, void **values_p, kvs_cu_pointer pointer)) \
	X(MemGetAddressRange, (kvs_cu_pointer * base_p, size_t * size_p, kvs_cu_pointer pointer)) \
	X(MemAlloc, (kvs_cu_pointer * pointer_p, size_t size)) \
	X(MemFree, (kvs_cu_pointer pointer)) \
	X(MemHostAlloc, (void **memory_p, size_t size, unsigned flags)) \
	X(MemFreeHost, (void *memory)) \
	X(MemHostGetDevicePointer, (kvs_cu_pointer * pointer_p, void *memory, unsigned flags)) \
	X(IpcGetMemHandle, (struct kvs_cu_ipc_handle * handle_p, kvs_cu_pointer pointer)) \
	X(IpcOpenMemHandle, (kvs_cu_pointer * pointer_p, struct kvs_cu_ipc_handle handle, unsigned flags)) \
	X(IpcCloseMemHandle, (kvs_cu_pointer pointer)) \
	X(MemRetainAllocationHandle, (kvs_cu_handle * handle_p, void *address)) \
	X(MemGetAllocationPropertiesFromHandle, (struct kvs_cu_allocation_prop * prop_p, kvs_cu_handle handle)) \
	X(MemExportToShareableHandle, \
	  (void *shareable_p, kvs_cu_handle handle, unsigned type, unsigned long long flags)) \
	X(MemImportFromShareableHandle, (kvs_cu_handle * handle_p, void *shareable, unsigned type)) \
	X(MemRelease, (kvs_cu_handle handle)) \
	X(MemAddressReserve, \
	  (kvs_cu_pointer * pointer_p, size_t size, size_t alignment, kvs_cu_pointer hint, unsigned long long flags)) \
	X(MemAddressFree, (kvs_cu_pointer pointer, size_t size)) \
	X(MemMap, \
	  (kvs_cu_pointer pointer, size_t size, size_t offset, kvs_cu_handle handle, unsigned long long flags)) \
	X(MemUnmap, (kvs_cu_pointer pointer, size_t size)) \
	X(MemSetAccess, (kvs_cu_pointer pointer, size_t size, const struct kvs_cu_access *access, size_t count)) \
	X(MemGetHandleForAddressRange, \
	  (void *handle_p, kvs_cu_pointer pointer, size_t size, unsigned type, unsigned long long flags)) \
	X(FlushGPUDirectRDMAWrites, (unsigned target, unsigned scope)) \
	X(ThreadExchangeStreamCaptureMode, (unsigned *mode_p)) \
	X(StreamCreateWithPriority, (kvs_cu_stream * stream_p, unsigned flags, int priority)) \
	X(StreamSynchronize, (kvs_cu_stream stream)) \
	X(StreamDestroy, (kvs_cu_stream stream)) \
	X(EventCreate, (kvs_cu_event * event_p, unsigned flags)) \
	X(EventRecord, (kvs_cu_event event, kvs_cu_stream stream)) \
	X(EventQuery, (kvs_cu_event event)) \
	X(EventSynchronize, (kvs_cu_event event)) \
	X(EventDestroy, (kvs_cu_event event)) \
	X(ModuleLoadData, (kvs_cu_module * module_p, const void *image)) \
	X(ModuleGetFunction, (kvs_cu_function * function_p, kvs_cu_module module, const char *name)) \
	X(ModuleUnload, (kvs_cu_module module)) \
	X(LaunchKernel, (kvs_cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, \
	                 unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes, \
	                 kvs_cu_stream stream, void **arguments, void **extra)) \
	X(LaunchHostFunc, (kvs_cu_stream stream, kvs_cu_host_function function, void *data)) \
	X(MemcpyHtoDAsync, (kvs_cu_pointer to, const void *from, size_t size, kvs_cu_stream stream)) \
	X(Memcpy2DAsync, (const struct kvs_cu_memcpy2d *copy, kvs_cu_stream stream))

struct kvs_cuda {
	int version; /* the driver's: 12080 is 12.8 */
#define X(name, parameters) kvs_cu_result(*name) parameters;
	KVS_CUDA_FUNCTIONS(X)
#undef X
};

/*
 * The driver's functions, or NULL with text: the process has not loaded it, it is too old, or it lacks a function. The
 * table is static and never changes once it was handed out. Any thread; takes a lock of its own.
 */
const struct kvs_cuda *kvs_cuda_get(struct kvs_text *text);

/* "CUDA_ERROR_INVALID_VALUE"; never NULL. Any thread. */
const char *kvs_cuda_error_name(const struct kvs_cuda *cuda, kvs_cu_result error);

/* Did it go well? If not text says "<call>: <error name> (<number>)". Any thread. */
bool kvs_cuda_ok(const struct kvs_cuda *cuda, kvs_cu_result result, const char *call, struct kvs_text *text);

/* kvs_cuda_call(cuda, text, EventRecord, event, stream): the call, checked with kvs_cuda_ok. */
#define kvs_cuda_call(cuda, text, function, ...) \
	kvs_cuda_ok((cuda), (cuda)->function(__VA_ARGS__), "cu" #function, (text))

/*
 * A stretch of code of ours on somebody's thread: a context made current, and calls that may not be made while another
 * thread captures a graph allowed for this thread (they touch no stream of the server's).
 */
struct kvs_cuda_scope {
	const struct kvs_cuda *cuda;
	unsigned mode; /* the thread's own */
	bool exchanged;
	bool pushed;
};

/* context NULL: none is pushed. False with text, and nothing is to be left. */
bool kvs_cuda_enter(struct kvs_cuda_scope *scope, const struct kvs_cuda *cuda, kvs_cu_context context,
                    struct kvs_text *text);
void kvs_cuda_leave(struct kvs_cuda_scope *scope);

/* "GPU-8f2b…" as the system's tools print it. */
#define KVS_CUDA_UUID_TEXT 41
void kvs_cuda_uuid_text(const struct kvs_cu_uuid *uuid, char text_p[KVS_CUDA_UUID_TEXT]);

#endif
