// One read or write of a tensor: its file, its progress, its first error.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>

#include "aio.h"

namespace aio {

// Note [Two descriptors]: whole blocks of a file go past the page cache through a descriptor with O_DIRECT. The bytes
// before the first and after the last block boundary, and the rest of a request that the kernel cut short, go through a
// second descriptor without it: the page cache then merges them with the neighbouring bytes of the same block. Direct and
// buffered requests of one operation never share a page, and the kernel flushes or drops cached pages below a direct one.
class File {
public:
    // fd >= 0: the caller's own descriptor, which stays open; it is used without O_DIRECT unless it has that flag.
    File(const char* path, int fd, bool is_write);
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    int open();  // returns 0 or an errno
    int buffered();  // the descriptor without O_DIRECT, or -errno

    bool has_direct() const { return direct_fd_ >= 0; }
    int direct() const { return direct_fd_; }
    uint64_t memory_alignment() const { return memory_alignment_; }
    int64_t size() const;  // of a regular file, now; else -1
    // Allocates what a write from begin to end adds to the file. Returns 0 or an errno.
    int grow(int64_t begin, int64_t end);
    void close();

private:
    int open_with(int extra_flags) const;
    void ask_alignment();

    const std::string path_;
    const int user_fd_;
    const bool is_write_;
    std::mutex mutex_;
    bool is_open_ = false;
    int error_ = 0;
    int direct_fd_ = -1;
    int buffered_fd_ = -1;
    uint64_t memory_alignment_ = AIO_ALIGNMENT;
};

class Operation {
public:
    Operation(const char* path, int fd, bool is_write, int64_t begin, int64_t end, int pieces)
        : file(path, fd, is_write), is_write(is_write), begin_(begin), end_(end), open_pieces_(pieces) {
        if (pieces == 0) finish();
    }

    // Makes the file ready at the first call. Returns whether there is something left to do: no error so far.
    bool prepare();
    // Only the first error counts.
    void fail(int error, AioStage stage, int64_t offset);
    void fail_at_end_of_file(int64_t offset);  // offset: where nothing was found
    bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
    void piece_done();
    bool wait(int timeout_ms);
    void result(AioResult* out);

    File file;
    const bool is_write;
    std::atomic<int64_t> direct_bytes{0}, bounced_bytes{0}, buffered_bytes{0};

private:
    void finish();

    const int64_t begin_, end_;
    std::atomic<int> open_pieces_;
    std::atomic<bool> has_failed_{false};
    std::once_flag prepared_;
    std::mutex mutex_;
    std::condition_variable ended_;
    bool is_done_ = false;
    AioResult result_{};
};

}  // namespace aio
