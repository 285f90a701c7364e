/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the double of libcuda.so.1. */
#ifndef KVS_DOUBLE_CUDA_DOUBLE_H
#define KVS_DOUBLE_CUDA_DOUBLE_H

#include <pthread.h>
#include <stdbool.h>

#include "../../../transport/cuda_driver.h"
#include "control.h"

#define EXPORT      __attribute__((visibility("default")))
#define GRANULARITY (2u << 20)
#define NAME_PREFIX "kvs-double-cuda-"

enum {
	OK = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	INVALID_DEVICE = 101,
	INVALID_IMAGE = 200,
	INVALID_CONTEXT = 201,
	PEER_UNSUPPORTED = 217,
	INVALID_HANDLE = 400,
	NOT_FOUND = 500,
	ILLEGAL_ADDRESS = 700,
	NOT_PERMITTED = 800,
	NOT_SUPPORTED = 801,
	CAPTURE_UNSUPPORTED = 900,
	CAPTURE_INVALIDATED = 901,
};

/* May a call be made while another thread captures a graph in the global mode? */
enum safety {
	SAFE,
	UNSAFE,
};

/* Every function: name without "cu", symbol suffix, safety. */
#define CALLS(X) \
	X(Init, "", SAFE) \
	X(DriverGetVersion, "", SAFE) \
	X(GetErrorName, "", SAFE) \
	X(DeviceGet, "", SAFE) \
	X(DeviceGetCount, "", SAFE) \
	X(DeviceGetUuid, "", SAFE) \
	X(DeviceGetAttribute, "", SAFE) \
	X(DeviceCanAccessPeer, "", SAFE) \
	X(DevicePrimaryCtxGetState, "", SAFE) \
	X(DevicePrimaryCtxRetain, "", UNSAFE) \
	X(DevicePrimaryCtxRelease, "_v2", UNSAFE) \
	X(CtxCreate, "_v2", UNSAFE) \
	X(CtxDestroy, "_v2", UNSAFE) \
	X(CtxPushCurrent, "_v2", SAFE) \
	X(CtxPopCurrent, "_v2", SAFE) \
	X(CtxSetCurrent, "", SAFE) \
	X(CtxGetCurrent, "", SAFE) \
	X(CtxGetDevice, "", SAFE) \
	X(CtxGetStreamPriorityRange, "", SAFE) \
	X(CtxSynchronize, "", UNSAFE) \
	X(PointerGetAttribute, "", SAFE) \
	X(PointerGetAttributes, "", SAFE) \
	X(MemGetAddressRange, "_v2", SAFE) \
	X(MemAlloc, "_v2", UNSAFE) \
	X(MemFree, "_v2", UNSAFE) \
	X(MemAllocAsync, "", SAFE) \
	X(MemFreeAsync, "", SAFE) \
	X(MemAllocManaged, "", UNSAFE) \
	X(MemHostAlloc, "", UNSAFE) \
	X(MemFreeHost, "", UNSAFE) \
	X(MemHostGetDevicePointer, "_v2", SAFE) \
	X(IpcGetMemHandle, "", UNSAFE) \
	X(IpcOpenMemHandle, "_v2", UNSAFE) \
	X(IpcCloseMemHandle, "", UNSAFE) \
	X(MemGetAllocationGranularity, "", SAFE) \
	X(MemCreate, "", UNSAFE) \
	X(MemRelease, "", UNSAFE) \
	X(MemRetainAllocationHandle, "", UNSAFE) \
	X(MemGetAllocationPropertiesFromHandle, "", SAFE) \
	X(MemExportToShareableHandle, "", UNSAFE) \
	X(MemImportFromShareableHandle, "", UNSAFE) \
	X(MemAddressReserve, "", UNSAFE) \
	X(MemAddressFree, "", UNSAFE) \
	X(MemMap, "", UNSAFE) \
	X(MemUnmap, "", UNSAFE) \
	X(MemSetAccess, "", UNSAFE) \
	X(MemGetHandleForAddressRange, "", SAFE) \
	X(FlushGPUDirectRDMAWrites, "", SAFE) \
	X(ThreadExchangeStreamCaptureMode, "", SAFE) \
	X(StreamCreate, "", UNSAFE) \
	X(StreamCreateWithPriority, "", UNSAFE) \
	X(StreamSynchronize, "", UNSAFE) \
	X(StreamDestroy, "_v2", UNSAFE) \
	X(StreamBeginCapture, "_v2", SAFE) \
	X(StreamEndCapture, "", SAFE) \
	X(GraphDestroy, "", SAFE) \
	X(EventCreate, "", UNSAFE) \
	X(EventRecord, "", SAFE) \
	X(EventQuery, "", UNSAFE) \
	X(EventSynchronize, "", UNSAFE) \
	X(EventDestroy, "_v2", UNSAFE) \
	X(ModuleLoadData, "", UNSAFE) \
	X(ModuleGetFunction, "", SAFE) \
	X(ModuleUnload, "", UNSAFE) \
	X(LaunchKernel, "", SAFE) \
	X(LaunchHostFunc, "", SAFE) \
	X(MemcpyHtoD, "_v2", UNSAFE) \
	X(MemcpyDtoH, "_v2", UNSAFE) \
	X(MemsetD8, "_v2", UNSAFE) \
	X(MemcpyHtoDAsync, "_v2", SAFE) \
	X(MemcpyDtoDAsync, "_v2", SAFE) \
	X(Memcpy2DAsync, "_v2", SAFE)

enum call {
#define X(name, suffix, safety) CALL_##name,
	CALLS(X)
#undef X
	        CALL_COUNT
};

struct CUctx_st {
	int device; /* visible ordinal */
	bool primary;
	bool active;
	int retained;
	_Atomic unsigned error; /* sticky */
};

/* First thing in every function: counts, injects faults, refuses what would break a capture. */
unsigned enter(enum call call);
#define ENTER(name) \
	do { \
		unsigned entered = enter(CALL_##name); \
		if (entered != OK) \
			return entered; \
	} while (0)
/* The same for what runs on a stream. */
unsigned fault_of(const char *name);
void delay(void);

/* Devices and contexts. */
extern int device_count;
struct CUctx_st *current(void); /* NULL: none */
struct CUctx_st *primary(int device);
bool device_uuid(int device, struct kvs_cu_uuid *uuid_p);
int device_of_uuid(const struct kvs_cu_uuid *uuid); /* -1: not visible */
bool peers(int device, int other);

/* What a GPU says of network cards that reach its memory (rdma.c); 0 for any other attribute. */
int rdma_attribute(unsigned attribute);

/* Memory: every range that the GPU can reach. The lock is held for reading while a kernel runs. */
enum range_kind {
	RANGE_LEGACY,
	RANGE_POOL,
	RANGE_MANAGED,
	RANGE_HOST,
	RANGE_VMM,
	RANGE_IPC, /* another process's legacy allocation */
};

struct handle {
	int refs; /* references of this process and its mappings */
	int held; /* references of this process */
	int fd;
	size_t size;
	int device;
	unsigned types;
	uint64_t block_id;
};

struct range {
	uint64_t base;
	size_t size;
	uint8_t *memory; /* where the GPU finds the bytes */
	enum range_kind kind;
	int device;
	int fd; /* -1: none */
	struct CUctx_st *context;
	uint64_t buffer_id;
	uint64_t block_id;
	struct handle *handle; /* VMM */
	unsigned access;       /* VMM: of the one device it was set for */
	int access_device;
	int opens; /* IPC */
	struct kvs_cu_ipc_handle ipc;
	_Atomic uint64_t writes;
};

extern pthread_rwlock_t ranges_lock;
struct range *range_find(uint64_t address);         /* the lock held */
struct range *range_after(uint64_t address);        /* the first that begins there or later; NULL: none */
struct range *range_add(const struct range *range); /* for writing */
void range_remove(struct range *range);             /* for writing */
uint64_t next_id(void);
int memory_make(size_t size);                          /* a memfd, or -1 */
bool memory_show(struct range *range, int protection); /* choose base and memory for range->fd */
void memory_hide(struct range *range);
int live_ranges(enum range_kind kind, bool opens);
int live_handles(void);
int live_reservations(void);
extern bool host_access;

/* Device memory for a stream's work, whole within one range; NULL: illegal. The lock held for reading. */
uint8_t *reach(uint64_t address, size_t size, int device, bool write);

/* Streams. */
unsigned stream_put(struct CUstream_st *stream, unsigned (*run)(void *work, int device), const void *work, size_t size);
extern __thread bool in_host_function; /* this thread runs one: no call of the driver is allowed */
bool capture_forbids(enum safety safety);
int live_streams(void);
int live_events(void);
int live_modules(void);
int live_retained(void);
int live_pushed(void);

#endif
