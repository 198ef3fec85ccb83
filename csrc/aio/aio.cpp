#include "aio.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <new>
#include <system_error>
#include <vector>

#include "worker.h"

namespace {

constexpr int64_t MAX_BLOCK_BYTES = 1 << 30;  // the kernel moves less than 2 GB at a time
constexpr int MAX_OPEN_JOBS = 256;  // of a handle; with two descriptors each, half of the usual limit of 1024

using OperationRef = std::shared_ptr<aio::Operation>;

struct Handle {
    std::vector<std::unique_ptr<aio::Worker>> workers;
};

std::unique_ptr<aio::Backend> make_backend(int engine, int depth, int* error) {
    switch (engine) {
        case AIO_URING: return aio::make_uring_backend(depth, error);
        case AIO_LIBAIO: return aio::make_libaio_backend(depth, error);
        case AIO_THREADS: return aio::make_thread_backend(depth, error);
    }
    *error = EINVAL;
    return nullptr;
}

OperationRef& as_operation(void* operation) { return *static_cast<OperationRef*>(operation); }

}  // namespace

extern "C" {

void* ds_aio_open(int32_t engine, int64_t block_bytes, int32_t queue_depth, int32_t single_submit, int32_t overlap_events,
                  int32_t workers, int32_t* error) {
    const aio::Settings settings{std::min(block_bytes, MAX_BLOCK_BYTES), queue_depth, single_submit != 0, overlap_events != 0,
                                 std::max(1, MAX_OPEN_JOBS / workers)};
    try {
        auto handle = std::make_unique<Handle>();
        for (int i = 0; i < workers; ++i) {
            auto backend = make_backend(engine, queue_depth, error);
            if (backend == nullptr) return nullptr;
            handle->workers.push_back(std::make_unique<aio::Worker>(settings, std::move(backend)));
        }
        *error = 0;
        return handle.release();
    } catch (const std::bad_alloc&) {
        *error = ENOMEM;
    } catch (const std::system_error& failure) {
        *error = failure.code().value();
    }
    return nullptr;
}

void ds_aio_close(void* handle) { delete static_cast<Handle*>(handle); }

void* ds_aio_start(void* handle, const char* path, int32_t fd, int32_t is_write, const AioPiece* pieces, int32_t count) {
    int64_t begin = count > 0 ? pieces[0].file_offset : 0, end = begin;
    for (int i = 0; i < count; ++i) {
        begin = std::min(begin, pieces[i].file_offset);
        end = std::max(end, pieces[i].file_offset + pieces[i].bytes);
    }
    try {
        auto operation = std::make_unique<OperationRef>(
            std::make_shared<aio::Operation>(path, fd, is_write != 0, begin, end, count));
        for (int i = 0; i < count; ++i) {
            const AioPiece& piece = pieces[i];
            static_cast<Handle*>(handle)->workers[piece.worker]->add(
                {*operation, reinterpret_cast<char*>(piece.memory), piece.file_offset, piece.bytes, piece.is_aligned != 0});
        }
        return operation.release();
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

int32_t ds_aio_wait(void* operation, int32_t timeout_ms) { return as_operation(operation)->wait(timeout_ms); }

void ds_aio_result(void* operation, AioResult* result) { as_operation(operation)->result(result); }

void ds_aio_free(void* operation) { delete &as_operation(operation); }

}  // extern "C"
