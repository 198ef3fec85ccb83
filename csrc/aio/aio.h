// Asynchronous file I/O for tensors: the plain C interface that deepspeed/ops/aio/native.py calls through ctypes.
//
// A handle owns threads ("workers"). Each worker keeps up to `queue_depth` requests in flight through one backend.
// An operation moves one tensor: the caller cuts it into pieces and names the worker of each; a worker cuts its pieces
// into blocks. Structs have fixed-size fields only, so that Python can declare them.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum AioEngine { AIO_URING = 0, AIO_LIBAIO = 1, AIO_THREADS = 2 };

// What an operation was doing when it failed.
enum AioStage { AIO_NO_ERROR = 0, AIO_OPENING = 1, AIO_GROWING = 2, AIO_MOVING = 3, AIO_END_OF_FILE = 4 };

struct AioPiece {
    uint64_t memory;       // address of the first byte
    int64_t file_offset;
    int64_t bytes;
    int32_t worker;        // index, below the handle's number of workers
    int32_t is_aligned;    // file_offset and bytes are multiples of AIO_ALIGNMENT: may go past the page cache
};

struct AioResult {
    int32_t error;           // errno, 0 for success
    int32_t stage;           // AioStage
    int64_t offset;          // position in the file: of the request that failed; with AIO_END_OF_FILE, where the file ends
    int64_t direct_bytes;    // moved between disk and the tensor's own memory
    int64_t bounced_bytes;   // moved past the page cache by way of an aligned buffer
    int64_t buffered_bytes;  // moved through the page cache
    int32_t is_without_direct;  // the file system does not take O_DIRECT for this file
    int32_t reserved;
};

#define AIO_ALIGNMENT 4096
#define AIO_PUBLIC __attribute__((visibility("default")))

// Returns a handle, or NULL and an errno in *error when the engine is not built in or the kernel refuses it.
AIO_PUBLIC void* ds_aio_open(int32_t engine, int64_t block_bytes, int32_t queue_depth, int32_t single_submit,
                             int32_t overlap_events, int32_t workers, int32_t* error);
// Waits for the work in flight, ends the threads and frees the handle.
AIO_PUBLIC void ds_aio_close(void* handle);

// Starts an operation on `path`, or on the open descriptor `fd` when path is NULL, and returns it. The memory must stay
// valid until ds_aio_wait has returned 1.
AIO_PUBLIC void* ds_aio_start(void* handle, const char* path, int32_t fd, int32_t is_write, const AioPiece* pieces,
                              int32_t count);
// Returns 1 once the operation has ended, 0 after timeout_ms.
AIO_PUBLIC int32_t ds_aio_wait(void* operation, int32_t timeout_ms);
AIO_PUBLIC void ds_aio_result(void* operation, AioResult* result);
AIO_PUBLIC void ds_aio_free(void* operation);

#ifdef __cplusplus
}
#endif
