#include "operation.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace aio {

File::File(const char* path, int fd, bool is_write)
    : path_(path != nullptr ? path : "/proc/self/fd/" + std::to_string(fd)), user_fd_(path != nullptr ? -1 : fd),
      is_write_(is_write) {}

File::~File() { close(); }

void File::close() {
    for (int fd : {direct_fd_, buffered_fd_})
        if (fd >= 0 && fd != user_fd_) ::close(fd);
    direct_fd_ = buffered_fd_ = -1;
}

int File::open_with(int extra_flags) const {
    // A descriptor of the caller exists, so that opening it once more must not create anything.
    const int create = is_write_ && user_fd_ < 0 ? O_CREAT : 0;
    int fd;
    do fd = ::open(path_.c_str(), (is_write_ ? O_WRONLY : O_RDONLY) | create | O_CLOEXEC | extra_flags, 0666);
    while (fd < 0 && errno == EINTR);
    return fd < 0 ? -errno : fd;
}

int File::open() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_open_) return error_;
    is_open_ = true;
    if (user_fd_ >= 0) {
        const int flags = fcntl(user_fd_, F_GETFL);
        if (flags < 0) return error_ = errno;
        // Linux's pwrite() ignores its offset on such a descriptor.
        if (is_write_ && (flags & O_APPEND) != 0) return error_ = EINVAL;
        ((flags & O_DIRECT) != 0 ? direct_fd_ : buffered_fd_) = user_fd_;
    } else {
        direct_fd_ = open_with(O_DIRECT);
        // EINVAL: the file system does not know O_DIRECT.
        if (direct_fd_ < 0 && direct_fd_ != -EINVAL) return error_ = -direct_fd_;
    }
    if (direct_fd_ >= 0) ask_alignment();
    if (direct_fd_ < 0 && buffered_fd_ < 0) buffered_fd_ = open_with(0);
    if (direct_fd_ < 0 && buffered_fd_ < 0) return error_ = -buffered_fd_;
    return 0;
}

// Asks the kernel (6.1 and later) what O_DIRECT wants of this file; earlier ones are served with whole pages.
void File::ask_alignment() {
#ifdef STATX_DIOALIGN
    struct statx status;
    if (statx(direct_fd_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) != 0) return;
    if ((status.stx_mask & STATX_DIOALIGN) == 0) return;
    if (status.stx_dio_mem_align != 0 && status.stx_dio_offset_align <= AIO_ALIGNMENT) {
        memory_alignment_ = status.stx_dio_mem_align;
        return;
    }
    // O_DIRECT is accepted by open() and not by reads, or only for blocks larger than ours.
    if (direct_fd_ != user_fd_) ::close(direct_fd_);
    direct_fd_ = -1;
#endif
}

int64_t File::size() const {
    struct stat status;
    if (fstat(direct_fd_ >= 0 ? direct_fd_ : buffered_fd_, &status) != 0 || !S_ISREG(status.st_mode)) return -1;
    return status.st_size;
}

int File::buffered() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (buffered_fd_ < 0) {
        buffered_fd_ = open_with(0);
        // Only a part of a page is wanted: reading ahead would cost a megabyte of bandwidth.
        if (buffered_fd_ >= 0 && direct_fd_ >= 0) posix_fadvise(buffered_fd_, 0, 0, POSIX_FADV_RANDOM);
    }
    return buffered_fd_;
}

// Note [Growing first]: direct writes that extend a file wait for each other, since each changes the file's size. With the
// blocks allocated and the size set beforehand they run in parallel; and a full disk is found before anything is written.
int File::grow(int64_t begin, int64_t end) {
    const int64_t old_size = size();
    if (old_size < 0 || old_size >= end) return 0;
    const int fd = direct_fd_ >= 0 ? direct_fd_ : buffered();
    if (fd < 0) return -fd;
    int failed;
    do failed = fallocate(fd, 0, std::max(begin, old_size), end - std::max(begin, old_size)) != 0 ? errno : 0;
    while (failed == EINTR);
    const bool is_fatal = failed == ENOSPC || failed == EFBIG || failed == EDQUOT || failed == EIO || failed == EBADF;
    return is_fatal ? failed : 0;
}

bool Operation::prepare() {
    std::call_once(prepared_, [this] {
        if (const int error = file.open()) {
            fail(error, AIO_OPENING, begin_);
        } else if (!is_write && file.size() >= 0 && file.size() < end_) {
            fail_at_end_of_file(file.size());
        } else if (is_write) {
            if (const int full = file.grow(begin_, end_)) fail(full, AIO_GROWING, begin_);
        }
    });
    return !has_failed();
}

void Operation::fail(int error, AioStage stage, int64_t offset) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (has_failed_.load(std::memory_order_relaxed)) return;
    result_.error = error;
    result_.stage = stage;
    result_.offset = offset;
    has_failed_.store(true, std::memory_order_release);
}

void Operation::fail_at_end_of_file(int64_t offset) {
    // A block further on may find the end first, so that the size counts; files of sysfs are shorter than their size.
    const int64_t size = file.size();
    fail(ENODATA, AIO_END_OF_FILE, size < 0 ? offset : std::max(begin_, std::min(offset, size)));
}

void Operation::piece_done() {
    if (open_pieces_.fetch_sub(1, std::memory_order_acq_rel) == 1) finish();
}

void Operation::finish() {
    const bool is_without_direct = !file.has_direct();
    file.close();
    std::lock_guard<std::mutex> lock(mutex_);
    result_.is_without_direct = is_without_direct;
    result_.direct_bytes = direct_bytes;
    result_.bounced_bytes = bounced_bytes;
    result_.buffered_bytes = buffered_bytes;
    is_done_ = true;
    ended_.notify_all();
}

bool Operation::wait(int timeout_ms) {
    std::unique_lock<std::mutex> lock(mutex_);
    return ended_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return is_done_; });
}

void Operation::result(AioResult* out) {
    std::lock_guard<std::mutex> lock(mutex_);
    *out = result_;
}

}  // namespace aio
