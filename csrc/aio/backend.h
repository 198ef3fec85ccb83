// One way to have several reads and writes in flight. A backend is used by one thread.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace aio {

struct Request {
    int slot;  // the caller's number for it, below the depth that the backend was made with
    bool is_write;
    int fd;
    void* buffer;
    size_t bytes;
    int64_t offset;
};

struct Completion {
    int slot;
    int64_t result;  // bytes moved, or -errno
};

class Backend {
public:
    virtual ~Backend() = default;
    // Takes a request; it may begin only with the next submit or wait.
    virtual void start(const Request& request) = 0;
    // Hands the started requests to whoever carries them out. Those that are refused complete with an error.
    virtual void submit() = 0;
    // Submits, waits until at least `at_least` started requests are complete, and appends all that are.
    virtual void wait(int at_least, std::vector<Completion>& done) = 0;
};

// Each returns nullptr, and an errno in *error, where it cannot work.
std::unique_ptr<Backend> make_uring_backend(int depth, int* error);
std::unique_ptr<Backend> make_libaio_backend(int depth, int* error);
std::unique_ptr<Backend> make_thread_backend(int depth, int* error);

}  // namespace aio
